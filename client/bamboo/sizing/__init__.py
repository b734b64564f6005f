"""Recommended machines, grid and protection of a job: the candidates, their trials, the choice."""
