"""The engine of a worker: it obeys the coordinator's plans, runs its stages, and continues when a worker is lost."""
