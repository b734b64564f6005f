"""Settings of every test: one compute thread, as in a worker; no test case fails for being slow."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("bamboo", deadline=None)
settings.load_profile("bamboo")
