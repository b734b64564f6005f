"""A job in virtual time: the real coordinator, and workers with a profile's times."""
