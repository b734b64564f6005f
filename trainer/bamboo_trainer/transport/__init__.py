"""Sending frames between workers: links over TCP, each of one connection or several."""
