"""Kubernetes on this machine, whose nodes run pods as local processes or in containerd. See docs/testing-cluster.md."""
