"""The trainer on PyTorch: pipeline engine, replication and takeover of stages. It imports no kopf or kubernetes."""
