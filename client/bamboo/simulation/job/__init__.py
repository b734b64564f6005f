"""A job in virtual time: the real coordinator, and workers that take the time that a profile says."""
