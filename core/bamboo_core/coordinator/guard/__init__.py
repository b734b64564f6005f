"""States and results that have to be the same: compared, and what follows if they differ."""
