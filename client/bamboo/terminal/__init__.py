"""A run on a terminal: its picture, its tables and its keys."""
