"""BambooJobs: the controller of all jobs, and the reconciler and coordinator of each."""
