"""Nodes that come and go, and their prices, as values and in the form that is recorded."""
