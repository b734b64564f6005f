"""A worker's process, and the fork server that starts it."""
