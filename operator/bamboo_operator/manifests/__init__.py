"""Rendering of Kubernetes objects: worker pods with their templates and placement, network policies and events."""
