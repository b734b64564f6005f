"""What one candidate comes to: its job, the world that it is simulated in, and its runs there."""
