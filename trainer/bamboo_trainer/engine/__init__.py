"""The engine of a worker: it obeys the coordinator's plans, runs its stages, and continues when others are lost."""
