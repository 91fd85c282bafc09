"""Weight gradient of a dense GEMM, added to main gradients in its own epilogue.

Shapes: T tokens, I input width, O output width.
"""

import torch
from torch import Tensor

from moeplan.kernels.main_grad import MainGrad

_HALF = (torch.bfloat16, torch.float16)


def add_weight_grad_(main: MainGrad, grad_TO: Tensor, x_TI: Tensor) -> None:
    """``main`` [O, I] plus grad.t() @ x.

    On CUDA, 16-bit operands and an fp32 total take one cuBLAS call that reads and writes the total; the product is
    never rounded to 16 bits. Elsewhere the product is made and added.
    """
    total_OI = main.total
    if main.is_clear and total_OI.dtype == x_TI.dtype:
        torch.mm(grad_TO.t(), x_TI, out=total_OI)
        main.is_clear = False
        return
    if not (total_OI.is_cuda and total_OI.dtype == torch.float32 and x_TI.dtype in _HALF):
        main.add_(grad_TO.t() @ x_TI)
        return
    torch.ops.aten.addmm.dtype_out(
        total_OI, grad_TO.t(), x_TI, torch.float32, beta=0 if main.is_clear else 1, out=total_OI
    )
    main.is_clear = False
