"""The checkpoints of a job: their form, the store that holds them, and what is decided about them."""
