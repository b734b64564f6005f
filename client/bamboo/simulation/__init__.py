"""Simulation of training in virtual time: what a job does, takes and costs under a trace of spot nodes."""
