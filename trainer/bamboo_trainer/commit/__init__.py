"""Committing steps, and keeping the replicas of a stage in step with its owner."""
