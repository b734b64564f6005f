"""A job's page: the document that it is drawn from, and the server of page and document."""
