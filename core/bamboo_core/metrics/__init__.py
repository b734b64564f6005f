"""The Prometheus metrics that Bamboo exports, and how the metrics of a job are computed."""
