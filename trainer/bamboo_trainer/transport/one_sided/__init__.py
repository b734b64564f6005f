"""Bodies of large frames by one-sided writes into a receiver's registered memory; who makes these is behind a seam."""
