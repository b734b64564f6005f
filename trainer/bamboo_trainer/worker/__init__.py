"""The worker process around an engine: main loop, fork server, history, loggers, metrics and traces."""
