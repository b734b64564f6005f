"""Server ports that callers cannot exhaust: the listener, its limits, and the process's file descriptors."""
