"""Device and host memory of a worker: placement, copies, recomputation, and estimates of a job's need."""
