"""Layers as files, and checkpoints as plain state dicts."""
