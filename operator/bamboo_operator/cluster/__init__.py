"""The operator's cache of pods and nodes, and the resync that finds missed deletions and broken watches."""
