"""A port that callers cannot fill up: its listener, its limits, and the file descriptors of this process."""
