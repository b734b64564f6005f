"""Calls to the trainer, each in a new process, since this process does not import torch."""
