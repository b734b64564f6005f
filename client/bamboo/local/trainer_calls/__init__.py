"""Calls of the trainer by commands, in a process of its own."""
