"""The coordinator: a pure function of state, event and time, and what people are shown of its state."""
