"""The programs behind warm processes; see `warm_processes.py`."""
