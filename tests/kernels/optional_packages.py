"""Back ends of packages that a machine may lack."""

import pytest

from moeplan.kernels import grouped_gemm_quack


def skip_without(backend: str) -> None:
    """Skip the test where the back end's package is missing."""
    if backend in grouped_gemm_quack.TILES and grouped_gemm_quack.installed_version() is None:
        pytest.skip("quack-kernels is not installed")
