"""Splits a whole torch.nn.Module into the layers of a task."""
