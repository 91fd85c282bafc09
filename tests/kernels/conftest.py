"""Triton kernels run under its interpreter where there is no GPU; ``test_on_gpu.py`` runs them where there is one."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported
