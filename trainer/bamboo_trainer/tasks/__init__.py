"""What the user brings: looked at, made ready, called, and blamed by name for what is wrong with it."""
