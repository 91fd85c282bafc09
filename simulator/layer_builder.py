"""Makers of ops with the sizes of one layer on one rank. T tokens, h hidden size, f MLP width."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moeplan.model_spec import ModelSpec
from moeplan.simulator.op import GraphScope, Op, Segment
from moeplan.simulator.op_shapes import OpShape
from moeplan.simulator.stack import SoftwareStack
from moeplan.vocabulary import Bf16Module, OpFamily, RecomputeModule, wide_precision

# Bytes a backward element-wise kernel moves over those of its forward: a norm reads x and dy and writes dx (3 over 2);
# SwiGLU reads 2f + f and writes 2f (5 over 3).
NORM_BACKWARD, ACTIVATION_BACKWARD = 1.5, 5 / 3


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """Makes ops of one shape; the methods below add the defaults that most ops of a kind share."""

    model: ModelSpec
    shape: OpShape
    stack: SoftwareStack

    @property
    def copies_quantize(self) -> bool:
        """Whether experts take tokens and copy them themselves, which those without biases and clamps do."""
        moe = self.model.moe
        is_plain = moe is not None and not moe.mlp_bias and self.model.activation != "clamped_swiglu"
        return self.shape.copies_quantize and is_plain

    def of_module(self, module: Bf16Module) -> "LayerBuilder":
        """The maker for that kind of linear: wider ones where the plan keeps it out of its low precision."""
        if module not in self.shape.bf16_modules:
            return self
        return replace(self, shape=replace(self.shape, precision=wide_precision(module, self.shape.precision)))

    def gemm_frac(self, dtype: str) -> float:
        """Rate of the stack's GEMMs of that format over the machine's readings."""
        time = self.stack.time
        own = {"fp8": time.fp8_gemm_frac, "fp8_block": time.fp8_block_gemm_frac}.get(dtype)
        return time.gemm_frac.value * (1.0 if own is None else own.value)

    def gemm(
        self,
        name: str,
        sizes: tuple[float, float, float],
        family: OpFamily = "dense_gemm",
        *,
        plain: bool = False,
        segment: Segment = "before",
        scope: GraphScope = "attention",
        modules: Sequence[RecomputeModule] = (),
        after: tuple[str, ...] | None = None,
    ) -> Op:
        """One linear layer: rows x inner by inner x cols; ``plain`` keeps it out of low precision."""
        rows, cols, inner = sizes
        dtype = self.shape.plain_dtype if plain else self.shape.format.gemm_dtype
        low = self.shape.format.quantized_bytes
        in_bytes = self.shape.element_bytes if plain or low is None else low
        return Op(
            name=name,
            kind="gemm",
            rate_frac=self.gemm_frac(dtype),
            family=family,
            dtype=dtype,
            rows=rows,
            cols=cols,
            inner=inner,
            flops=2 * rows * cols * inner,
            hbm_bytes=(rows + cols) * inner * in_bytes + rows * cols * self.shape.element_bytes,
            segment=segment,
            scope=scope,
            modules=frozenset(modules),
            after=after,
        )

    def memory(
        self,
        name: str,
        elements: float,
        backward_frac: float,
        family: OpFamily = "elementwise",
        *,
        segment: Segment = "before",
        scope: GraphScope = "attention",
        modules: Sequence[RecomputeModule] = (),
        after: tuple[str, ...] | None = None,
    ) -> Op:
        """An element-wise kernel that moves ``elements`` activation elements, ``backward_frac`` as many backward."""
        num_bytes = elements * self.shape.element_bytes * self.stack.time.elementwise_factor.value
        return Op(
            name=name,
            kind="memory",
            family=family,
            hbm_bytes=num_bytes,
            backward_hbm_bytes=num_bytes * backward_frac,
            segment=segment,
            scope=scope,
            modules=frozenset(modules),
            after=after,
        )

    def quantize(
        self,
        name: str,
        elements: tuple[float, float],
        family: OpFamily,
        segment: Segment,
        scope: GraphScope,
        *,
        normed: float = 0.0,
    ) -> list[Op]:
        """The copies quantized GEMMs need beyond what measured rates include; none in plain formats.

        ``elements`` of inputs forward and of output gradients backward; ``normed`` more inputs come from a norm, which
        in some recipes writes the copies in the place of its output.
        """
        inputs, grads = elements
        time, precision = self.stack.time, self.shape.precision
        per_element = time.quantize_bytes_per_element.get(precision)
        if self.shape.format.quantized_bytes is None or per_element is None or per_element.value == 0:
            return []
        inputs += 0.0 if precision in time.norm_quantizes else normed
        return [
            Op(
                name=name,
                kind="memory",
                family=family,
                hbm_bytes=inputs * per_element.value,
                backward_hbm_bytes=grads * per_element.value,
                segment=segment,
                scope=scope,
            )
        ]

    def tp_collective(
        self,
        kind: Literal["all_gather", "reduce_scatter"],
        name: str,
        width: float,
        scope: GraphScope = "attention",
        *,
        plain: bool = False,
    ) -> list[Op]:
        """All-gather or reduce-scatter of gathered tokens x ``width`` over the tp group; none where tp is 1.

        ``plain``: what it feeds is no low-precision linear.
        """
        if self.shape.tp == 1:
            return []
        low, wide = self.shape.format.quantized_bytes, self.shape.element_bytes
        # What is gathered feeds a linear, which takes it quantized; sums are kept wide.
        each = low if low is not None and kind == "all_gather" and not plain else wide
        num_bytes = self.shape.gathered_tokens * width * each
        if self.shape.tp_comm_overlap:  # the GEMM beside it starts, or ends, with the part of one rank
            num_bytes /= self.shape.tp
        return [
            Op(
                name=name,
                kind=kind,
                family="tp_comm",
                stream="tp",
                comm_bytes=num_bytes,
                group=self.shape.tp_group,
                scope=scope,
            )
        ]
