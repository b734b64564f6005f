"""What the trainer does for a command on this machine, in a process of its own."""
