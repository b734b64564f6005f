"""A job as Python sees it: made, checked, planned, simulated, run here and submitted; the command line uses it, too."""
