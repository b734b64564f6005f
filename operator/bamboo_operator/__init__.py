"""The Kubernetes operator. It does not import torch."""
