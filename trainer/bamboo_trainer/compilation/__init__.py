"""Layers compiled by torch.compile, each separately: requirements, cut backwards, and when to compile."""
