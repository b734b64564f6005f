"""What the cluster shows: indexed pods and nodes, missed deletions, and whether it is watched at all."""
