"""A worker's checkpoints: writing, committing, finding and reading; layers as files, exports, and initial weights."""
