"""Diagnosis of what may keep a job from starting: facts read from a cluster, and checks of them."""
