"""`bamboo simulate`, and the commands that make what it starts from: traces of nodes and profiles of layers."""
