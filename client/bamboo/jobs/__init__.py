"""The Python API, which builds, checks, plans, simulates, runs and submits jobs. The command line calls it, too."""
