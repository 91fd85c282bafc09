"""Triton's interpreter rounds to FP8 with a carry lost (0.49 becomes 0.25): torch's conversion in its place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_DTYPES = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


@contextmanager
def exact_fp8() -> Iterator[None]:
    """Kernels interpreted inside convert to FP8 as a GPU does."""
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data: Any, from_type: Any, to_type: Any, rounding: Any) -> Any:
        if str(to_type) not in _DTYPES or str(from_type) != "fp32":
            return original(data, from_type, to_type, rounding)
        stored = torch.from_numpy(np.ascontiguousarray(data)).to(_DTYPES[str(to_type)])
        return stored.view(torch.uint8).numpy()

    interpreter._convert_float = convert
    try:
        yield
    finally:
        interpreter._convert_float = original
