"""The coordinator: a pure function of state, event and time, and the status that shells show."""
