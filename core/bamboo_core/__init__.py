"""What decides: jobs, plans, the coordinator and the contracts of trainer and operator. No torch, no kopf."""
