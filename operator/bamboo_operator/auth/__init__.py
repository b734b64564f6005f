"""Authentication: the workers' port and its check of pods' tokens, and the serving certificate."""
