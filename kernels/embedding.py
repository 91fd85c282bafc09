"""Gradient of an embedding, added to the main gradients of its rows.

Shapes: T tokens, V rows of the embedding, H hidden.
"""

from torch import Tensor

from moeplan.kernels.main_grad import MainGrad
from moeplan.kernels.triton_choice import default_backend


def add_rows_(main: MainGrad, grad_TH: Tensor, row_T: Tensor, *, backend: str | None = None) -> None:
    """``main`` [V, H] plus each token's gradient in row ``row_T`` of it; tokens of row -1 add nothing.

    Sums are made in the dtype of the total, each in one order, so that runs repeat themselves. The gradient is read
    once and the rows of these tokens are read and written once, where torch's own gradient of the embedding has all of
    its rows: written as zeros, summed, and read by whoever adds it.
    """
    main.add_zeros_()
    if (backend or default_backend(grad_TH)) == "torch":
        kept_T = row_T >= 0
        main.total.index_add_(0, row_T[kept_T], grad_TH[kept_T].to(main.total.dtype))
        return
    from moeplan.kernels import embedding_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

    embedding_triton.add_rows_(main.total, grad_TH, row_T)
