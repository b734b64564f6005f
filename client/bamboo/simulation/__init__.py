"""Training in virtual time: what a job would do, take and cost under a trace of spot nodes."""
