"""The assignment of stages to workers: the plan as a value, and pure functions that compute the next plan."""
