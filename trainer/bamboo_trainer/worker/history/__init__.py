"""A worker's part in the job's history: what it knows of it, writes of it, and gives to loggers."""
