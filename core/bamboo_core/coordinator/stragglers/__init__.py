"""Slow workers: their detection and display, and their replacement or a new split of layers."""
