"""The control channel between workers and their coordinator: its messages, and the server that admits workers."""
