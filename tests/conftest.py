"""Settings of every test: one compute thread, as in a worker."""

import torch

torch.set_num_threads(1)
