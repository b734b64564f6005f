"""Signals of pods and nodes that a worker ends: clouds' marks, and the events for the job's coordinator."""
