"""`task.initialFrom`: other weights as the first values of a model's tensors."""
