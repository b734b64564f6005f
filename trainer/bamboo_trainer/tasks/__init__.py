"""The user's task: examining, preparing and calling it, and naming the part that is at fault."""
