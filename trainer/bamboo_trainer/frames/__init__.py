"""Frames between workers: what they are, what they carry, and which tensors they may carry; `transport` moves them."""
