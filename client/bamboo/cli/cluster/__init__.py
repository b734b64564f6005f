"""The commands on a cluster: their flags, their completion, and the same as kubectl's plugin."""
