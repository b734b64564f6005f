"""What pods and nodes say of a worker's end: marks, signals, and what becomes an event for its coordinator."""
