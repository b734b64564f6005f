"""The trainer on PyTorch: pipeline engine, replication and takeover of stages. Imports neither kopf nor kubernetes."""
