"""Which workers of a run on this machine are taken away on purpose, and when. Pure."""
