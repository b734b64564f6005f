"""What may keep jobs of a cluster from training: facts that are read from it, and what follows from them."""
