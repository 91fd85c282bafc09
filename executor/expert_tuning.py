"""Which back ends compute a plan's bf16 experts fastest: what is compared, and how.

Shapes: E experts of this rank, R rows, H input width, F output width.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from moeplan.executor.candidate_timing import Candidates, compare
from moeplan.executor.mesh import Mesh
from moeplan.kernels import grouped_gemm, grouped_gemm_quack, grouped_weight_grad
from moeplan.kernels.back_end_choice import Shape
from moeplan.kernels.grouped_weight_grad import TRITON, add_parts_, triton_takes
from moeplan.kernels.main_grad import MainGrad
from moeplan.kernels.optional_package import with_compiler
from moeplan.kernels.weight_grad_pairs import Operands
from moeplan.plan import Plan

LARGE_EXPERT_ROWS = 256  # below it one launch an expert costs more than its products: never a candidate
# Of the GPU, an expert's product: less leaves the host, which launches all else too and waits for offsets in each
# layer, no time to stay ahead. By expert, h200-deepseek (64 experts, 40 and 80 us each) had steps of 1134 to 1253 ms.
LEAST_PRODUCT_S = 200e-6


def expert_shapes(plan: Plan, mesh: Mesh) -> list[Shape]:
    """Shapes [E, H, F] of the expert weights of a rank."""
    moe, model = plan.model.moe, plan.model
    if moe is None:
        return []
    num_local, width = moe.num_experts // mesh.ep.size, moe.expert_ffn_size // mesh.etp.size
    rows = model.expert_hidden_size
    return [(num_local, rows, width * (2 if model.is_gated else 1)), (num_local, width, rows)]


def may_take_quack(plan: Plan) -> bool:
    """It keeps a launch plan for each number of rows and drops none, and nobody has captured it in a graph here yet."""
    return plan.folding.ep == 1 and not plan.dynamic_cp and not plan.cuda_graph


def experts_key(shape: Shape, num_rows: int, num_added: int, *, with_quack: bool) -> str:
    """What names a comparison, where an addition has the weight gradients of ``num_added`` micro-batches: 1 or 2."""
    version = grouped_gemm_quack.installed_version() if with_quack else None
    quack = f"quack {with_compiler(version)}, " if version else ""
    what = f"{'x'.join(map(str, shape))}, {num_rows} rows, bf16 into fp32"
    added = " of two micro-batches" if num_added == 2 else ""
    return f"{quack}{what}{added}, each product in rounds under load"


def measure_experts(
    shape: Shape, num_rows: int, device: torch.device, num_added: int, *, with_quack: bool
) -> dict[str, dict[str, float]]:
    """Seconds of each candidate: a forward product, an input's gradient, one addition of weight gradients."""
    product = ExpertProduct(shape, num_rows, device, num_added, with_quack=with_quack)
    return {
        grouped_gemm.OPERATION: compare(product.forward()),
        grouped_gemm.INPUT_GRAD: compare(product.input_gradient()),
        grouped_weight_grad.OPERATION: compare(product.additions(num_added)),
    }


class ExpertProduct:
    """A weight [E, H, F] with what it meets in a step, as calls by back end.

    Micro-batches have memory of their own: the same operands again would come from L2.
    """

    def __init__(
        self, shape: Shape, num_rows: int, device: torch.device, num_micro_batches: int, *, with_quack: bool = True
    ) -> None:
        E, H, F = shape
        offsets_E = drawn_offsets(E, num_rows, device)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device, dtype=torch.bfloat16)

        self.weight_EHF = normal(E, H, F)
        self.parts = [Operands(normal(num_rows, H), normal(num_rows, F), offsets_E) for _ in range(num_micro_batches)]
        self.main = MainGrad(torch.zeros(shape, device=device), is_clear=False)
        self.names = product_candidates(self.parts[0].x_TH, self.weight_EHF, with_quack=with_quack)

    def forward(self) -> Candidates:
        """Products of one micro-batch."""
        one = self.parts[0]
        return {
            name: partial(grouped_gemm.PRODUCTS[name], one.x_TH, self.weight_EHF, one.offsets_E) for name in self.names
        }

    def input_gradient(self) -> Candidates:
        """Gradients of one micro-batch's rows."""
        one, weight_EFH = self.parts[0], self.weight_EHF.transpose(1, 2)
        return {
            name: partial(grouped_gemm.PRODUCTS[name], one.grad_TF, weight_EFH, one.offsets_E) for name in self.names
        }

    def additions(self, num_micro_batches: int) -> Candidates:
        """Weight gradients of so many micro-batches, added to fp32 at once where a back end can."""
        names = [*self.names, *(TRITON if triton_takes(self.main.total, self.parts[0].x_TH) else ())]
        parts = self.parts[:num_micro_batches]
        return {name: partial(add_parts_, self.main, parts, backend=name) for name in names}


def together(each: Sequence[Candidates]) -> Candidates:
    """One call after the other by the same back end, where it takes all."""

    def run_all(name: str) -> None:
        for calls in each:
            calls[name]()

    return {name: partial(run_all, name) for name in each[0] if all(name in calls for calls in each)}


def product_candidates(x_RH: Tensor, weight_EHF: Tensor, *, with_quack: bool = True) -> list[str]:
    """Back ends that may be fastest for these operands, on average as many rows for each expert."""
    names = ["torch"]
    if len(x_RH) >= LARGE_EXPERT_ROWS * len(weight_EHF):
        names.append("by_expert")
    if with_quack and grouped_gemm_quack.takes(x_RH, weight_EHF):
        names += grouped_gemm_quack.TILES
    return names


def drawn_offsets(E: int, num_rows: int, device: torch.device) -> Tensor:
    """Where the rows of each expert end, each drawn with equal odds.

    As many for each would fill whole tiles, which no router's do: 128 experts of 1024 rows took 1.90 ms forward,
    drawn rows 2.06 (results/2026-11-30-h200-one-run.md).
    """
    generator = torch.Generator().manual_seed(0)
    num_rows_E = torch.multinomial(torch.ones(E), num_rows, replacement=True, generator=generator).bincount(minlength=E)
    return num_rows_E.cumsum(0).to(torch.int32).to(device)


def is_launch_bound(by_expert_s: float, num_products: int) -> bool:
    """Whether one launch for each of so many products leaves the host too little time, given seconds of all."""
    return by_expert_s < LEAST_PRODUCT_S * num_products
