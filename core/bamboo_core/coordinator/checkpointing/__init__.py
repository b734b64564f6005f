"""What becomes of a job's states: checkpoints, copies of them in host memory, and going on from one."""
