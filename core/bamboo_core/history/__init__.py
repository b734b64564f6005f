"""A job's history (steps, evaluations, events), in files of JSON lines that survive the workers that write them."""
