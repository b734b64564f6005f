"""Splitting of a whole torch.nn.Module into the layers of a task, by recording its forward."""
