"""How frames between workers travel over TCP, and large tensors over what is faster."""
