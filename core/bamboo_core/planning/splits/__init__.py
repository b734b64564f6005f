"""Layers split over stages: evenly or not, anew, and what steps took with each split. Pure."""
