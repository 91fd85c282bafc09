"""What the kernels of a linear mixer move between its two projections, counted in the code that Megatron calls.

Mamba-2: mamba_ssm's ``mamba_split_conv1d_scan_combined`` (state-spaces/mamba, ops/triton/ssd_combined.py) keeps the
projection and the scan's output; backward makes convolution, states and products of chunks again. Gated delta rule:
``chunk_gated_delta_rule`` of flash-linear-attention on contiguous, normed and repeated queries and keys, as Megatron's
GatedDeltaNet hands them over. Every kernel reads its inputs from memory and writes its outputs there.
"""

from typing import NamedTuple

from moeplan.mixers import GatedDeltaNet, LinearMixer, Mamba2
from moeplan.parameters import linear_mixer_projection

STATE_BYTES = 4.0  # Mamba-2's states of chunks, and its products of them, are made and passed on in fp32


class Traffic(NamedTuple):
    """Bytes of one token over all heads, and kernels, forward and backward."""

    forward_bytes: float
    backward_bytes: float
    forward_kernels: int
    backward_kernels: int


class ScanTraffic(NamedTuple):
    """The convolution with the copies around it, the recurrence itself, and the norm with its gate."""

    conv: Traffic
    scan: Traffic
    norm: Traffic


def scan_traffic(mixer: LinearMixer, element_bytes: float, mbs: int) -> ScanTraffic:
    """Traffic of one layer; ``mbs`` sequences of a micro-batch lie beside each other and are put in order first."""
    if isinstance(mixer, Mamba2):
        return _mamba2(mixer, element_bytes, mbs)
    return _gated_delta(mixer, element_bytes)


def state_elements(mixer: LinearMixer) -> int:
    """Elements of the state that one chunk hands to the next, all heads."""
    return mixer.inner_size * (mixer.state_size if isinstance(mixer, Mamba2) else mixer.k_head_dim)


def _mamba2(mixer: Mamba2, element_bytes: float, mbs: int) -> ScanTraffic:
    """x, z and the output are I wide, B and C each n; s: elements of states a token; p: of products within chunks.

    Forward: states read x and B (and are written), products of B and C, states passed on (narrow), then the scan reads
    x, z, C, products and states and writes its output with and without the gate. Backward: products and states again;
    gradients of the gate (7 I), of states, states passed back, of x (4 I), B, C, products (2 I) and decays (2 I).
    """
    inner, conv, shared = mixer.inner_size, mixer.conv_size, mixer.num_groups * mixer.state_size
    states = state_elements(mixer) / mixer.chunk_size
    products = mixer.num_groups * mixer.chunk_size
    forward = element_bytes * (5 * inner + 4 * shared + 4 * states) + STATE_BYTES * (2 * states + 2 * products)
    backward = element_bytes * (18 * inner + 13 * shared + 8 * states) + STATE_BYTES * (6.5 * states + 6 * products)
    copied = 2 * (linear_mixer_projection(mixer) + inner) if mbs > 1 else 0
    copies = 2 if mbs > 1 else 0
    return ScanTraffic(
        conv=Traffic(element_bytes * (2 * conv + copied), element_bytes * (5 * conv + copied), 1 + copies, 2 + copies),
        scan=Traffic(forward, backward, 5, 15),
        norm=Traffic(element_bytes * 2 * inner, element_bytes * 3 * inner, 1, 1),
    )


def _gated_delta(mixer: GatedDeltaNet, element_bytes: float) -> ScanTraffic:
    """Queries and keys are K wide as projected and k once repeated, values v; s: states a token, p: products.

    Forward: norms and repetition, products of keys (fp32) and their inverse, rows w and u, states, output. Backward:
    rows and states again, gradients of values inside chunks, of states, of q, k and w, of the rows' own inputs.
    """
    narrow = mixer.num_k_heads * mixer.k_head_dim
    keys, values, conv = mixer.num_v_heads * mixer.k_head_dim, mixer.inner_size, mixer.conv_size
    states = state_elements(mixer) / mixer.chunk_size
    products = mixer.num_v_heads * mixer.chunk_size
    forward = 6 * narrow + 9 * keys + 6 * values + 2 * states + 2 * products
    backward = 8 * narrow + 21 * keys + 15 * values + 4 * states + 2 * products
    copied = 4 * conv  # to rows of channels and back
    return ScanTraffic(
        conv=Traffic(element_bytes * (2 * conv + copied), element_bytes * (3 * conv + copied), 5, 5),
        scan=Traffic(element_bytes * forward + STATE_BYTES * 2 * products, element_bytes * backward, 16, 20),
        norm=Traffic(element_bytes * 3 * values, element_bytes * 5 * values, 1, 2),
    )
