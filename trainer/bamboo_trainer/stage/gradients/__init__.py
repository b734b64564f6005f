"""The gradients of a cell's microbatches: how they are computed, and summed in one order."""
