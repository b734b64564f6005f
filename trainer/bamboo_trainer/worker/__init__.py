"""The process around an engine: the control channel, notices of the cloud, metrics, logs and traces."""
