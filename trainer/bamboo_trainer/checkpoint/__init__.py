"""A worker's checkpoints: writing, committing, finding, reading; layers as files, and exports as plain state dicts."""
