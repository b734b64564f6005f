"""Settings of every test: one compute thread, as in a worker; no test case fails for being slow.

Property tests try the same examples whenever the same tests run on the same code, and new ones with
--hypothesis-profile=random, as `make soak` does.
"""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
for name, same in (("bamboo", True), ("random", False)):
    settings.register_profile(name, derandomize=same, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bamboo")
