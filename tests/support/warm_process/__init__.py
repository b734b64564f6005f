"""Programs that start warm processes, and stand in for them in jobs; see `warm_processes.py`."""
