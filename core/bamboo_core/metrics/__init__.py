"""Every metric that Bamboo exports, and what a job's metrics are made from."""
