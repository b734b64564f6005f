"""Computing the gradients of a cell's microbatches, and summing them in one order."""
