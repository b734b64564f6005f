"""The coordinator of a job: a pure function of state, event and time, and the status that its shells show."""
