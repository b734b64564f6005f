"""Reading of a task's data ahead by step and microbatch, in this process or in others."""
