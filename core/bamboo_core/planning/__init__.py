"""Which worker runs which stage: the plan as a value, and the pure functions from one plan to the next."""
