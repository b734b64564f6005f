"""Parts of the ready-made tasks: data, losses, optimizers, and files of weights."""
