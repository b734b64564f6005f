"""Frames between workers: what they are, what they carry, and how they travel over TCP."""
