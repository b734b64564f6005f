"""One worker's part in the job: it obeys plans, runs what is ready, and continues when a neighbour is lost."""
