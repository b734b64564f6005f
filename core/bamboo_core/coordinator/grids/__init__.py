"""The grid (numbers of stages and pipelines) that a job runs: its choice for the available workers, and its changes."""
