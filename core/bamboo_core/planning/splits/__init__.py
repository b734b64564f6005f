"""Layers split over stages: evenly or not, and anew. Pure."""
