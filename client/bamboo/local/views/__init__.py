"""Views of a local run: its page, its workers' log, and its summary."""
