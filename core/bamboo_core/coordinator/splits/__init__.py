"""How the layers are split over stages while the job runs: who is how fast, and which split is faster."""
