"""A job's checkpoints: their format, the store that holds them, and the decisions about them."""
