"""How layers are split over stages: evenly, by speed, or anew in a re-split. Pure."""
