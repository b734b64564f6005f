"""The Kubernetes operator. No torch."""
