"""The job's workers: their admission, refusal and loss, and their reconnection after a restart of the coordinator."""
