"""The trainer: pipeline engine, redundancy and takeover on PyTorch. No kopf, no kubernetes."""
