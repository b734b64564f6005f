"""BambooJobs: the controller of all of them, and the reconciler and coordinator of each."""
