"""The command line's way to jobs on a cluster. Imported late: nothing here is needed to train on this machine."""
