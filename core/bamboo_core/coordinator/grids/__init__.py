"""The grid that the job runs: which one the workers of the moment are worth, and when it changes."""
