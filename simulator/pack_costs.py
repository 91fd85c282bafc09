"""Seconds of packed documents on a context-parallel group of any size, from the simulator's costs."""

from dataclasses import dataclass, field, replace

from moeplan.cp_schedule import padded_length
from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.simulator.attention_ops import attention_core, key_ring
from moeplan.simulator.backward_ops import backward_ops
from moeplan.simulator.costs import cost
from moeplan.simulator.layer_builder import LayerBuilder
from moeplan.simulator.linear_ops import HEAD_EXCHANGES, exchange_heads
from moeplan.simulator.op import Op
from moeplan.simulator.op_shapes import OpShape, Part
from moeplan.simulator.rank_groups import block_size, group_placement
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.step_model import step_model
from moeplan.step_packs import tokens_per_rank


@dataclass(frozen=True, slots=True)
class _Linear:
    """Everything but attention: seconds of a micro-batch = ``fixed_s`` + ``token_s`` x tokens of a rank."""

    fixed_s: float
    token_s: float


@dataclass(eq=False)
class PackCosts:
    """Forward and backward of one micro-batch on the slowest pipeline rank of a plan. Keeps what it has costed.

    Attention of documents adds up; keys and values of a pack pass in one ring, beside it (report section 6). Linear
    mixers exchange tokens for heads before and after their recurrence, beside nothing.
    """

    plan: Plan
    profile: HardwareProfile
    stack: SoftwareStack
    _attention: dict[tuple[int, int], float] = field(default_factory=dict)
    _rings: dict[tuple[int, int], float] = field(default_factory=dict)
    _exchanges: dict[tuple[int, int], float] = field(default_factory=dict)
    _attending: dict[Part, int] = field(init=False)
    _num_linear: int = field(init=False)
    _linear: _Linear = field(init=False)

    def __post_init__(self) -> None:
        if self.plan.cp_comm != "p2p":
            raise InvalidInputError(
                f"cp_comm: got {self.plan.cp_comm}, allowed with dynamic context parallelism: p2p",
                "groups of every size pass keys and values in a ring; leave cp_comm out",
            )
        self._attending, self._num_linear = {}, 0
        self._linear = self._linear_costs()

    def attention(self, length: int, num_ranks: int) -> float:
        """Attention of one document, on each of the ranks that share it; padded to two chunks a rank."""
        padded = padded_length(length, num_ranks)
        key = (padded, num_ranks)
        if key not in self._attention:
            build = self._builder(padded, num_ranks)
            self._attention[key] = sum(
                count * self._both_ways_s(build, attention_core(build, part.layer))
                for part, count in self._attending.items()
            )
        return self._attention[key]

    def pack(self, num_tokens: int, attention_s: float, num_ranks: int) -> float:
        """A pack whose documents take ``attention_s`` in all, shared by ``num_ranks`` ranks."""
        linear_s = self.linear(num_tokens / num_ranks)
        if num_ranks == 1:
            return linear_s + attention_s
        ring_s, last_s = self._ring_s(num_tokens, num_ranks), attention_s / num_ranks
        linear_s += self._exchange_s(num_tokens, num_ranks)
        if not self.stack.time.hides_cp:
            return linear_s + attention_s + ring_s
        return linear_s + max(attention_s - last_s, ring_s) + last_s

    def linear(self, num_tokens: float) -> float:
        """All but attention and its ring, of ``num_tokens`` on each rank."""
        return self._linear.fixed_s + self._linear.token_s * num_tokens

    def work(self, length: int) -> float:
        """Rank-seconds of one document on its own rank, what every pack costs left out."""
        return self._linear.token_s * length + self.attention(length, 1)

    @property
    def fixed(self) -> float:
        """What every micro-batch costs, however few its tokens."""
        return self._linear.fixed_s

    def ring_bytes(self, num_tokens: int, num_ranks: int) -> float:
        """What a rank sends in the forward of one layer: its pack's keys and values on to the other ranks."""
        local = -(-num_tokens // num_ranks)
        return key_ring(self._builder(local * num_ranks, num_ranks), "rope").comm_bytes

    def comm_s(self, num_tokens: int, num_ranks: int) -> float:
        """All messages between the ranks of a pack."""
        if num_ranks == 1:
            return 0.0
        return self._ring_s(num_tokens, num_ranks) + self._exchange_s(num_tokens, num_ranks)

    def _ring_s(self, num_tokens: int, num_ranks: int) -> float:
        """Keys and values of a pack on their way round its ranks, and in backward with their gradients."""
        local = -(-num_tokens // num_ranks)
        if (local, num_ranks) not in self._rings:
            build = self._builder(local * num_ranks, num_ranks)
            one_s = self._both_ways_s(build, replace(key_ring(build, "rope"), after=None))
            self._rings[local, num_ranks] = one_s * sum(self._attending.values())
        return self._rings[local, num_ranks]

    def _exchange_s(self, num_tokens: int, num_ranks: int) -> float:
        """Tokens for heads of linear mixers and back, and the same of gradients."""
        mixer, local = self.plan.model.linear_mixer, -(-num_tokens // num_ranks)
        if mixer is None or not self._num_linear:
            return 0.0
        if (local, num_ranks) not in self._exchanges:
            build = self._builder(local * num_ranks, num_ranks)
            ops = (op for name in HEAD_EXCHANGES for op in exchange_heads(build, mixer, name))
            both_s = sum(self._both_ways_s(build, replace(op, after=None)) for op in ops)
            self._exchanges[local, num_ranks] = both_s * self._num_linear
        return self._exchanges[local, num_ranks]

    def _both_ways_s(self, build: LayerBuilder, op: Op) -> float:
        ops = [op, *backward_ops([op], build.shape, self.stack.time)]
        return sum(cost(one, self.profile).seconds for one in ops)

    def _builder(self, num_tokens: int, num_ranks: int) -> LayerBuilder:
        plan, world = self.plan, self.plan.num_gpus
        block = block_size(world, int(self.profile.scale_up_domain_gpus.value))
        ranks = group_placement(world, num_ranks, plan.tp, block)
        shape = replace(
            OpShape.of(plan.point, self.stack, self.profile),
            mbs=1,
            seq_len=num_tokens,
            cp=num_ranks,
            packed_lengths=(),
            cp_group=ranks,
            cp_ring_group=ranks,
        )
        return LayerBuilder(plan.model, shape, self.stack)

    def _linear_costs(self) -> _Linear:
        """From two sizes of a micro-batch without context parallelism, on the same ranks."""
        plan, model = self.plan, step_model(self.plan.model, self.stack, self.profile)
        tokens = tokens_per_rank(plan)
        batch = plan.num_micro_batches * plan.dp * plan.cp
        points = [
            replace(plan.point, cp=1, mbs=1, seq_len=size, global_batch_size=batch, packed_lengths=())
            for size in (tokens, 2 * tokens)
        ]
        small, large = (
            (time.forward_s + time.backward_s).reshape(plan.vp, plan.pp).sum(axis=0)
            for time in model.step_times(points)
        )
        rank = int(large.argmax())
        for stage in model.stage_parts(plan.point)[rank :: plan.pp]:
            for part, count in stage.items():
                mixer = "none" if part.layer_kind is None else part.layer_kind.mixer
                if mixer == "attention":
                    self._attending[part] = self._attending.get(part, 0) + count
                self._num_linear += count * (mixer == "linear")
        rest = [
            float(seconds[rank]) - self.attention(size, 1) for seconds, size in ((small, tokens), (large, 2 * tokens))
        ]
        token_s = (rest[1] - rest[0]) / tokens
        return _Linear(max(0.0, rest[0] - token_s * tokens), token_s)
