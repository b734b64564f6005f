"""Signals of pods and nodes that a worker is lost or will be taken away, and the events for its coordinator."""
