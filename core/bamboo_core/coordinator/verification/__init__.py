"""Results that are there twice and differ: found, put down to a worker if possible, and undone."""
