"""What the cluster shows: cached pods and nodes, missed deletions, and whether it is watched at all."""
