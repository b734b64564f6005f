"""The records that make up the coordinator's state."""
