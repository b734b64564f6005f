"""Layers compiled by torch.compile, each separately: requirements, and when to compile."""
