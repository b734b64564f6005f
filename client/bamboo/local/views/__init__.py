"""Views of a local run: its page, its metrics, its workers' log, and its summary."""
