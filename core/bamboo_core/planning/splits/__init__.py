"""Division of layers among stages and devices: by cost, by workers' speed, and again while the job runs. Pure."""
