"""Trials of one candidate: its job, its simulated world, and its runs there."""
