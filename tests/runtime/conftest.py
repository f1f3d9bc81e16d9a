"""One thread: the tensors of these tests are small, and more threads only wait for each other."""

import torch

torch.set_num_threads(1)
