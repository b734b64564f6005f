"""A job as whoever shows it sees it, wherever it runs: one value, made of a BambooJob or of a coordinator's status."""
