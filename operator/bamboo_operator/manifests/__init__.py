"""Rendering of Kubernetes objects: worker pods with their templates and placement, and network policies."""
