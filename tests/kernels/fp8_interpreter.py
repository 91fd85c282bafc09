"""Triton's interpreter rounds to FP8 with a carry lost (0.49 becomes 0.25) and cuts to bf16: torch's conversions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_DTYPES = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "bf16": torch.bfloat16}


@contextmanager
def exact_fp8() -> Iterator[None]:
    """Kernels interpreted inside convert from fp32 to FP8 and bf16 as a GPU does."""
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data: Any, from_type: Any, to_type: Any, rounding: Any) -> Any:
        if str(to_type) not in _DTYPES or str(from_type) != "fp32":
            return original(data, from_type, to_type, rounding)
        stored = torch.from_numpy(np.ascontiguousarray(data)).to(_DTYPES[str(to_type)])
        return stored.view(torch.uint8 if stored.itemsize == 1 else torch.uint16).numpy()

    interpreter._convert_float = convert
    try:
        yield
    finally:
        interpreter._convert_float = original
