"""A BambooJob's manifest: its fields as values, the one parser with all rules, and what an edit may change."""
