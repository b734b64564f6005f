"""File access at a path or URL: calls that always return, with errors as one sentence."""
