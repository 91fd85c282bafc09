"""Back ends of packages that a machine may lack."""

import pytest
import torch

from moeplan.kernels import grouped_gemm_quack


def skip_without(backend: str) -> None:
    """Skip the test where the back end's package is missing, or the GPU is none that it was tested on."""
    if backend in grouped_gemm_quack.TILES:
        if grouped_gemm_quack.installed_version() is None:
            pytest.skip("quack-kernels is not installed")
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("needs Hopper")
