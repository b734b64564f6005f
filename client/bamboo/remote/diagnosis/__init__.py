"""What may keep a job from starting: facts that are read from a cluster, and what follows from them."""
