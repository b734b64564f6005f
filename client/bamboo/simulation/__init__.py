"""Simulation of training in virtual time: the course, time and cost of a job under a recording of spot nodes."""
