"""Simulation of one job in virtual time: the real coordinator, and workers with the times of a model's profile."""
