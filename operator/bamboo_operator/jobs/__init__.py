"""BambooJobs: the controller of all jobs, and for each job its reconciler and its coordinator's runner."""
