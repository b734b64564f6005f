"""One worker's part in the job: it obeys plans, runs what is ready, and goes on when a neighbour is gone."""
