"""Frames between workers: their kinds, payloads and allowed tensors; `transport` sends them."""
