"""Layers compiled by torch.compile, each by itself: what that needs, what of a layer it takes, and when it is done."""
