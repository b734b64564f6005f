"""One stage of the model: parameters, forward and backward, optimizer, and the state that workers send each other."""
