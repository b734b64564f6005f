"""Checkpoints, their copies in host memory, and restoring from them."""
