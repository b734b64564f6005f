"""What a worker shows of itself: its log, the trace of its instructions, and what its time goes to."""
