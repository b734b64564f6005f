"""The published Bamboo simulator (NSDI 2023): its cost model, its nodes and its six models. Pure."""
