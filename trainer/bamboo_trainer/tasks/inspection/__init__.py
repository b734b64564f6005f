"""What is looked at in a task before it trains: what its layers cost and share, and whether they are repeatable."""
