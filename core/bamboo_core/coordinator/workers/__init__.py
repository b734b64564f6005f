"""The job's workers: which belong to it, which are refused, and what follows when one ends."""
