"""One thread: the tensors of these tests are small, and more threads only wait for each other.

Without a GPU Triton's kernels are interpreted, which has to be said before anything imports Triton.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
