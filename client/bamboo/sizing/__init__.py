"""Sizing of a job: a search for the machines, grid and redundancy that train it fast and cheaply."""
