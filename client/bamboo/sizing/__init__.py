"""Which machines, grid and protection a job should have: candidates, their simulation, and the choice among them."""
