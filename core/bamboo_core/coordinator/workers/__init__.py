"""Which workers belong to the job, which are refused, and what follows when one ends."""
