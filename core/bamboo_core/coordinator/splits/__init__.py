"""How the layers are split over stages while the job runs: who is how fast, and whether another split pays."""
