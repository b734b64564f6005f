"""`bamboo simulate`, and the commands for traces of nodes and profiles of layers."""
