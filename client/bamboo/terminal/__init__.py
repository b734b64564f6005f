"""What a person sees of a run on a terminal, and what the keys do."""
