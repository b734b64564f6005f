"""What is shown of a local run: its page, its metrics, its workers' log, and what it came to."""
