"""Which plan is in force, and so to whom a frame goes."""
