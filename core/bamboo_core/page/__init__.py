"""A job's page: its document, and the server of both."""
