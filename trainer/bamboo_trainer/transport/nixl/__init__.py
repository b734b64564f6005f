"""One-sided writes by NIXL, over whatever network UCX finds."""
