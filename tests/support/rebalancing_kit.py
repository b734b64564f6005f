"""A coordinator that may split layers anew."""

HALVES, THIRDS = ((0, 4), (4, 8)), ((0, 3), (3, 8))
