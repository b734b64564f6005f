"""What a job has done, step by step and event by event, in files that survive whoever writes them."""
