"""What every test file shares: GPU tests are skipped without a GPU, and property tests have no time limit."""

import importlib.util
import os

# Two cores run four gloo processes at a time; one thread each keeps them from fighting. Must precede any torch import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton decides when it is first imported, by whichever test comes first, whether kernels run under its interpreter.
if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110 - nothing else may be imported before
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest

# No deadline: a first call compiles or reads files, and CI machines stall. In CI the examples are the same each time,
# so that a red run can be repeated.
hypothesis.settings.register_profile("moeplan", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("moeplan")


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; torch is imported only when such a test is there."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
