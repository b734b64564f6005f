"""Bodies of large frames by NIXL: one-sided writes into registered memory, over whatever network UCX finds."""
