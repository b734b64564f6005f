"""A BambooJob's manifest (fields as values, the one parser with all rules, what an edit may change) and its status."""
