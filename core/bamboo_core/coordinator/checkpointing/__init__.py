"""The coordinator's decisions on checkpoints, their copies in host memory, and restores."""
