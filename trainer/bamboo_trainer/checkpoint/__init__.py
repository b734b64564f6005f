"""A worker's checkpoints: written, committed, found and read; layers as files, and checkpoints as plain state dicts."""
