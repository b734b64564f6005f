"""Rendering of Kubernetes objects: the worker pod from the template, its placement, the network policy, events."""
