"""Inspection of a task before it trains: costs of its layers, shared parameters, and repeatability."""
