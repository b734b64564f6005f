"""The plan in force, and the worker that gets a frame."""
