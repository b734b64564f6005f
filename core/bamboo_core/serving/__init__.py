"""Ports that callers cannot exhaust: listener, limits, and this process's file descriptors."""
