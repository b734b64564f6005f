"""Jobs, plans, the coordinator, and the contracts between trainer and operator. Imports neither torch nor kopf."""
