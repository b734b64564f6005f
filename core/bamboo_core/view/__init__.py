"""A job for display, wherever it runs: one value, from a BambooJob or from a coordinator's status."""
