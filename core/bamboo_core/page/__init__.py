"""A job's page: its document, its timeline, and the servers of the page."""
