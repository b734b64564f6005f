"""Who shares the nodes: tenants' bounds, and whose turn it is when nodes are few."""
