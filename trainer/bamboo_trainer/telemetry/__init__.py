"""Telemetry of a worker: its log, the trace of its instructions, and its use of time."""
