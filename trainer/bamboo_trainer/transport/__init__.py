"""How frames between workers travel: links over TCP, each of one connection or several."""
