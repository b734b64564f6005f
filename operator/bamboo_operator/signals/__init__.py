"""Signals of pods and nodes that a worker is lost or will be: clouds' marks, and the events for its coordinator."""
