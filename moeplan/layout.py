"""Pipeline layouts: which parts of the model each virtual stage holds, and the strings that say so.

Megatron's notation: ``E`` embedding, ``t`` decoder layer, ``m`` MTP layer, ``L`` loss (final norm, head, cross
entropy), ``|`` between stages, ``*n`` repeats a symbol or a group in parentheses. Stages are numbered in
virtual-stage order: stage k runs on pipeline rank k mod PP. DeepSeek-V3 on PP4 VPP4: ``Et*4|(tttt|)*14tmL``.
"""

import bisect
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise

from moeplan.errors import InvalidInputError
from moeplan.model_spec import LayerKind, ModelSpec

# Weights of the balance rule, in MoE layers (report section 8: embedding and three dense layers about two MoE layers;
# an MTP depth costs a layer and a head). The loss is a head GEMM and a cross entropy of the model and of every depth.
EMBEDDING_WEIGHT, MIXER_WEIGHT, DENSE_WEIGHT, MOE_WEIGHT, MTP_WEIGHT, HEAD_WEIGHT = 0.2, 0.4, 0.2, 0.6, 1.0, 1.0
_GROUP = re.compile(r"\(([^()]*)\)(?:\*(\d+))?")
_REPEAT = re.compile(r"([EtmL|])\*(\d+)")
_MAX_SYMBOLS = 100_000


@dataclass(frozen=True, slots=True)
class Stage:
    """What one virtual stage holds. ``first_layer`` is the index of its first decoder layer."""

    has_embedding: bool
    first_layer: int
    num_layers: int
    num_mtp: int
    has_loss: bool

    @property
    def layers(self) -> range:
        """Indices of its decoder layers."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def symbols(self) -> str:
        return "E" * self.has_embedding + "t" * self.num_layers + "m" * self.num_mtp + "L" * self.has_loss


@dataclass(frozen=True)
class PipelineLayout:
    """Stages in virtual-stage order."""

    stages: tuple[Stage, ...]

    @classmethod
    def from_string(cls, text: str) -> "PipelineLayout":
        """Parse the notation above; InvalidInputError names the place that does not parse."""
        expanded = _expand(text)
        if not re.fullmatch(r"E?t*(?:\|t*)*m*(?:\|m*)*L?", expanded) or expanded[:1] != "E" or expanded[-1:] != "L":
            raise InvalidInputError(
                f"layout: got {text!r}, allowed: one E first, then t, then m, one L last, with | between stages",
                "for example Et*4|(tttt|)*14tmL",
            )
        stages, first = [], 0
        for part in expanded.split("|"):
            stage = Stage("E" in part, first, part.count("t"), part.count("m"), "L" in part)
            stages.append(stage)
            first += stage.num_layers
        return cls(tuple(stages))

    @cached_property
    def text(self) -> str:
        """Canonical string; parses back to the same layout."""
        parts = [_run_length(stage.symbols) for stage in self.stages]
        pieces: list[str] = []
        for part, run in groupby(parts[:-1]):
            count = len(list(run))
            pieces.append(f"({_spell(part)}|)*{count}" if count > 1 else f"{part}|")
        return "".join(pieces) + parts[-1]

    @property
    def num_layers(self) -> int:
        return sum(stage.num_layers for stage in self.stages)

    @property
    def num_mtp(self) -> int:
        return sum(stage.num_mtp for stage in self.stages)

    def stages_of_rank(self, pp: int, rank: int) -> tuple[Stage, ...]:
        """Stages that pipeline rank ``rank`` of ``pp`` holds, by virtual stage."""
        return self.stages[rank::pp]

    def check(self, model: ModelSpec, num_stages: int) -> None:
        """Raise InvalidInputError unless the layout holds exactly this model in ``num_stages`` stages."""
        for what, got, needed in (
            ("stages (pp x vp)", len(self.stages), num_stages),
            ("decoder layers (t)", self.num_layers, model.num_layers),
            ("MTP layers (m)", self.num_mtp, model.num_mtp_layers),
        ):
            if got != needed:
                raise InvalidInputError(
                    f"layout {self.text!r} has {got} {what}, {model.name} needs {needed}",
                    f"leave layout out to get {balanced_layout(model, num_stages).text!r}",
                )


def _expand(text: str) -> str:
    compact = re.sub(r"[\s,]", "", text)
    total = (
        sum(int(count) for count in re.findall(r"\*(\d+)", compact)[:100]) if len(compact) < 10_000 else _MAX_SYMBOLS
    )
    if total >= _MAX_SYMBOLS:
        raise InvalidInputError(f"layout: {text[:40]!r} is too long", "repeat counts should be those of a real model")
    expanded = _GROUP.sub(lambda found: _unroll(found[1]) * int(found[2] or 1), compact)
    expanded = _unroll(expanded)
    wrong = re.search(r"[^EtmL|]", expanded)
    if wrong or not expanded:
        where = f"unexpected {wrong[0]!r}" if wrong else "it is empty"
        raise InvalidInputError(
            f"layout: got {text!r}: {where}, allowed: E t m L | and *n after a symbol or a group in parentheses",
            "for example Et*4|(tttt|)*14tmL",
        )
    return expanded


def _unroll(text: str) -> str:
    return _REPEAT.sub(lambda found: found[1] * int(found[2]), text)


def _spell(text: str) -> str:
    """Inside a group, spell repeats out: ``(t*4|)*14`` reads worse than ``(tttt|)*14`` up to eight symbols."""
    plain = _unroll(text)
    return plain if len(plain) <= 8 else text


def _run_length(symbols: str) -> str:
    runs = [(symbol, len(list(run))) for symbol, run in groupby(symbols)]
    return "".join(symbol * count if count < 3 else f"{symbol}*{count}" for symbol, count in runs)


@lru_cache(maxsize=1024)
def balanced_layout(model: ModelSpec, num_stages: int, head_weight: float = HEAD_WEIGHT) -> PipelineLayout:
    """The layout whose heaviest stage is lightest, filled from the end, so that slack falls on the first stage.

    The first pipeline rank holds the most micro-batches in flight. Gives NVIDIA's own layout for DeepSeek-V3 at 16
    stages; at 32 the heaviest stage weighs what theirs does (2), and the first holds a dense layer less.
    ``head_weight``: a head and its loss, in MoE layers. Raises InvalidInputError with more stages than layers.
    """
    kinds = model.layer_kinds
    # Depths that share their weights stay in one stage; Megatron builds a model from a pattern with all of them beside
    # the loss.
    loss, head = "L", head_weight * (1 + model.num_mtp_layers)
    num_together = model.num_mtp_layers if model.mtp_shared else 1
    num_mtp = model.num_mtp_layers // max(1, num_together)
    if model.layer_pattern:
        loss, head = "m" * model.num_mtp_layers + loss, head + MTP_WEIGHT * model.num_mtp_layers
        num_mtp = 0
    symbols = ["E", *"t" * len(kinds), *["m" * num_together] * num_mtp, loss]
    weights = [
        EMBEDDING_WEIGHT,
        *(_layer_weight(model, kind) for kind in kinds),
        *[MTP_WEIGHT * num_together] * num_mtp,
        head,
    ]
    if num_stages > len(kinds) + 2:
        raise InvalidInputError(
            f"pp x vp = {num_stages} stages, but {model.name} has only {len(kinds)} layers", "use fewer pipeline stages"
        )
    sums = [0.0, *accumulate(weights)]
    caps = sorted(
        {round(sums[end] - sums[start], 9) for start in range(len(sums)) for end in range(start + 1, len(sums))}
    )
    best = bisect.bisect_left(caps, 1, key=lambda cap: int(_cut(weights, num_stages, cap) is not None))
    cuts = _cut(weights, num_stages, caps[best])
    if cuts is None:  # cannot happen: one stage holding all but a layer a stage always fits the largest cap
        raise AssertionError(f"no layout of {model.name} in {num_stages} stages")
    parts = ["".join(symbols[start:end]) for start, end in pairwise(cuts)]
    return PipelineLayout.from_string("|".join(parts))


def _layer_weight(model: ModelSpec, kind: LayerKind) -> float:
    """A layer's time over that of one with attention and experts; in a model without experts, with a dense MLP."""
    mlp = {"moe": MOE_WEIGHT, "dense": DENSE_WEIGHT if model.moe is not None else MOE_WEIGHT, "none": 0.0}[kind.mlp]
    return mlp + (MIXER_WEIGHT if kind.mixer != "none" else 0.0)


def _cut(weights: list[float], num_stages: int, cap: float) -> list[int] | None:
    """Cut positions of at most ``cap`` a stage, filled from the end; every stage gets at least one item."""
    end, cuts = len(weights), [len(weights)]
    for stages_left in range(num_stages - 1, -1, -1):
        start, load = end, 0.0
        while start > stages_left and load + weights[start - 1] <= cap + 1e-6:
            start -= 1
            load += weights[start]
        if start == end:
            return None
        cuts.append(start)
        end = start
    return cuts[::-1] if end == 0 else None
