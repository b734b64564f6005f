"""New splits of the layers over stages while the job runs: workers' speeds, faster splits, and cuts."""
