"""What nodes cost while jobs run: read from a file or a URL, and given to the pools of jobs."""
