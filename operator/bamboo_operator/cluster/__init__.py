"""What the cluster shows: cached pods and nodes, what their marks and states mean for a worker, missed deletions."""
