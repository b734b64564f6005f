"""Terminal output of the commands: the live view of a job, local or on a cluster, progress bars, phrases and tables."""
