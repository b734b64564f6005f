"""Estimates of step time and memory on a grid, for the coordinator, `bamboo plan` and the simulator alike."""
