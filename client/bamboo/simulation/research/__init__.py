"""The published Bamboo simulator: its cost model, its nodes and its six models. Pure."""
