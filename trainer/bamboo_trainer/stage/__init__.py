"""One stage of the model: its parameters, its forward and backward, its optimizer, its state as it travels."""
