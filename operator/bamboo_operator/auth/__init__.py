"""Authentication of workers: the port to which they connect, its certificate, and the check of their pods' tokens."""
