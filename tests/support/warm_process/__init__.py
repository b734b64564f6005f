"""What makes a process that a test starts a warm one; see `warm_processes.py`."""
