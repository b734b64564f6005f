"""The control channel between workers and their coordinator: messages, client and server."""
