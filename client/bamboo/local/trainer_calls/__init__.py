"""Calls of the trainer, each in a process of its own, since this process may lack torch."""
