"""A Kubernetes cluster on this machine. Nodes run pods as processes or in containerd. See docs/testing-cluster.md."""
