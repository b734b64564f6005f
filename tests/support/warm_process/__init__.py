"""Programs that run in or for warm processes; see `warm_processes.py`."""
