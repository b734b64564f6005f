"""The grid that the job runs: its choice for the available workers, and its changes."""
