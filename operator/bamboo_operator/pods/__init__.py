"""One job's pods: creating, deleting and moving them between node pools, and why they do not start."""
