"""A job as the command line sees it: read from the API server, as facts, in words, on the screen."""
