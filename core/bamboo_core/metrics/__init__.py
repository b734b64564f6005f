"""The metrics that Bamboo exports, and how a job's are computed."""
