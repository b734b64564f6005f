"""The process around an engine: its agent, cloud notices, metrics, logs and traces."""
