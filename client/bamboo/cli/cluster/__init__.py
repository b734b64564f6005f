"""The commands on a cluster: their flags and their completion."""
