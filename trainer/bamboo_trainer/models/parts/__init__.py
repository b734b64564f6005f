"""What the ready-made tasks are made of: data, losses, optimizers, and files of weights."""
