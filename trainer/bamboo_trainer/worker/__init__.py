"""The process around an engine: its agent, notices of the cloud, metrics, logs and traces."""
