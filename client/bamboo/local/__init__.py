"""`bamboo run`: a job on this machine, with a process for each worker."""
