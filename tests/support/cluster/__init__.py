"""Real Kubernetes on loopback, with nodes whose pods are local processes. See docs/testing-cluster.md."""
