"""File storage on disk or in an object store: calls have a time limit and retries, errors are one sentence."""
