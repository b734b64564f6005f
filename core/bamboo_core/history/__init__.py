"""A job's history, by step and event, in files that survive their writers."""
