"""A worker's part in the job's history: its knowledge, its files, and its loggers."""
