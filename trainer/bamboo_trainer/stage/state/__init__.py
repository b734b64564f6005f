"""A stage's state from step to step: parameters, optimizer, numbers; held here, and copied for others."""
