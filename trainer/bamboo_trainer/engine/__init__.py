"""One worker's part in the job: it obeys plans, runs ready work, and continues when a neighbour is lost."""
