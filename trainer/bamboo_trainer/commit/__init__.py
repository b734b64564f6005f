"""How a step is committed, and how the replicas of a stage follow its owner."""
