"""The records of which the coordinator's state is made."""
