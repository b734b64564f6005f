"""A job's place in a queue: the one Workload that asks Kueue for all its workers, and what follows from the answer."""
