"""Which plan is in force, and which worker gets a frame."""
