"""A task's data, read ahead by step and microbatch, in this process or in others."""
