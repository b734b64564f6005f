"""Which machines, grid and protection a job should have: which candidates there are, which are tried, which is best."""
