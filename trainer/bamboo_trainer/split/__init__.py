"""How a whole torch.nn.Module becomes the layers of a task."""
