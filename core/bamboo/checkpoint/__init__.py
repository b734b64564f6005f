"""Where checkpoints are kept: their form, the store that holds them, and what is decided about them."""
