"""What machines cost: lists of prices, by machine and zone, and traffic between zones."""
