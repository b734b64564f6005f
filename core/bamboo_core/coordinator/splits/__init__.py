"""The split of layers over stages while the job runs: speeds of workers, and faster splits."""
