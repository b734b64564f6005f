"""Calls to the trainer, each in a new process, since this process may lack torch."""
