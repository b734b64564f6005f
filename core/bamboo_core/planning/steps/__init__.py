"""Step times and memory on a grid: one model for the coordinator's choice, plans and simulations."""
