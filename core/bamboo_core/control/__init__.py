"""The control channel between workers and their coordinator: its messages, and both of its ends."""
