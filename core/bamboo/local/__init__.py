"""Run a BambooJob on this machine: the local shell around the coordinator."""
