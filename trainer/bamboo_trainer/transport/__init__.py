"""The transport of frames between workers: links over TCP, each with one or more connections."""
