"""The Kubernetes operator. No torch. An empty shell for now: see the status table in the README."""
