"""A worker's part in the job's history: what it knows, writes, and gives to loggers."""
