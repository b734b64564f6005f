"""How frames travel between workers: the Transport protocol and its implementations."""
