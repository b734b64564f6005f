"""The coordinator: a job's decisions as a pure function of state, event and time, and the job's status."""
