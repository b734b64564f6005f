"""Commits of steps, which the root decides, and replication of each stage's state to other workers."""
