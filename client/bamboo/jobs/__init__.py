"""Jobs in Python: built, checked, planned, simulated, run here and submitted; the command line uses them, too."""
