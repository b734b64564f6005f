"""Deliberate preemptions of workers in a local run. Pure."""
