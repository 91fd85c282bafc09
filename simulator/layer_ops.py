"""The forward ops of each part of a model, in program order, as one rank runs them for one micro-batch."""

from moeplan.model_spec import LayerKind, ModelSpec
from moeplan.simulator.attention_ops import attention_ops
from moeplan.simulator.layer_builder import ACTIVATION_BACKWARD, NORM_BACKWARD, LayerBuilder
from moeplan.simulator.linear_ops import linear_mixer_ops
from moeplan.simulator.moe_ops import moe_ops
from moeplan.simulator.op import Op
from moeplan.simulator.op_shapes import OpShape, Part
from moeplan.simulator.stack import SoftwareStack
from moeplan.vocabulary import RecomputeModule


def forward_ops(model: ModelSpec, part: Part, shape: OpShape, stack: SoftwareStack) -> list[Op]:
    """Forward ops of one part of the model."""
    build = LayerBuilder(model, shape, stack)
    if part.kind == "embedding":
        return _embedding(build)
    if part.kind == "loss":
        return _loss(build)
    if part.kind == "mtp":
        return _mtp_projection(build)
    return [*_mixer(build, part.kind, part.layer), *_mlp(build, part.kind)]


def _mixer(build: LayerBuilder, kind: LayerKind, layer: int) -> list[Op]:
    if kind.mixer == "attention":
        return attention_ops(build, layer)
    if kind.mixer == "linear" and build.model.linear_mixer is not None:
        return linear_mixer_ops(build, build.model.linear_mixer)
    return []


def _mlp(build: LayerBuilder, kind: LayerKind) -> list[Op]:
    if kind.mlp == "moe" and build.model.moe is not None:
        return moe_ops(build, build.model.moe)
    return _dense_mlp(build) if kind.mlp == "dense" else []


def _dense_mlp(build: LayerBuilder) -> list[Op]:
    model, shape = build.model, build.shape
    hidden, tokens, own = model.hidden_size, shape.gathered_tokens, shape.own_tokens
    width, gates = model.dense_ffn_size / shape.tp, model.mlp_matrices - 1
    mlp: tuple[RecomputeModule, ...] = ("mlp",)
    return [
        build.memory("pre_mlp_norm", 2 * own * hidden, NORM_BACKWARD, scope="mlp", modules=("layernorm",)),
        *build.tp_collective("all_gather", "mlp_all_gather", hidden, "mlp"),
        *build.quantize(
            "mlp.quantize",
            (tokens * width, tokens * (gates * width + hidden)),
            "elementwise",
            "before",
            "mlp",
            normed=tokens * hidden,
        ),
        build.gemm("mlp_fc1", (tokens, gates * width, hidden), scope="mlp", modules=mlp),
        build.memory("mlp_act", (gates + 1) * tokens * width, ACTIVATION_BACKWARD, scope="mlp", modules=mlp),
        build.gemm("mlp_fc2", (tokens, hidden, width), scope="mlp", modules=mlp),
        *build.tp_collective("reduce_scatter", "mlp_reduce_scatter", hidden, "mlp"),
        build.memory("mlp_residual", 3 * own * hidden, 1 / 3, scope="mlp"),
    ]


def _embedding(build: LayerBuilder) -> list[Op]:
    shape, hidden = build.shape, build.model.hidden_size
    return [
        build.memory("embedding", 2 * shape.gathered_tokens * hidden, 2.0, scope="outside"),
        *build.tp_collective("reduce_scatter", "embedding_reduce_scatter", hidden, "outside"),
    ]


def _loss(build: LayerBuilder) -> list[Op]:
    """Final norm, head GEMM over the vocabulary shard, cross entropy."""
    model, shape = build.model, build.shape
    tokens, vocab = shape.gathered_tokens, model.vocab_size / shape.tp
    moved = tokens * vocab * build.stack.time.loss_bytes_per_logit.value
    cross_entropy = Op(
        name="cross_entropy",
        kind="memory",
        family="loss",
        hbm_bytes=moved / 2,
        backward_hbm_bytes=moved / 2,
        scope="outside",
        num_kernels=4,
    )
    return [
        build.memory("final_norm", 2 * shape.own_tokens * model.hidden_size, NORM_BACKWARD, scope="outside"),
        *build.tp_collective("all_gather", "head_all_gather", model.hidden_size, "outside"),
        build.gemm("head", (tokens, vocab, model.hidden_size), "loss", plain=True, scope="outside"),
        cross_entropy,
    ]


def _mtp_projection(build: LayerBuilder) -> list[Op]:
    """What an MTP depth has beside its layer and its loss: three norms and the projection of 2h to h.

    Split over tp, the projection takes the tokens of the group and makes a part of their columns, which are gathered.
    """
    hidden, own = build.model.hidden_size, build.shape.own_tokens
    norms = build.memory("mtp_norms", 6 * own * hidden, NORM_BACKWARD, scope="outside")
    if not build.stack.time.splits_mtp_projection:
        return [norms, build.gemm("mtp_proj", (own, hidden, 2 * hidden), plain=True, scope="outside")]
    sizes = (build.shape.gathered_tokens, hidden / build.shape.tp, 2 * hidden)
    return [
        norms,
        *build.tp_collective("all_gather", "mtp_all_gather", 2 * hidden, "outside", plain=True),
        build.gemm("mtp_proj", sizes, plain=True, scope="outside"),
        *build.tp_collective("all_gather", "mtp_columns", hidden, "outside", plain=True),
    ]
