"""Profiles of a model on a machine: times and bytes of its layers, network and storage rates, start time."""
