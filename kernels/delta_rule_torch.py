"""The gated delta rule in chunks of tokens, as matrix products and one triangular solution a chunk (WY form).

Inside a chunk, with g[i] the sum of log decays up to token i and S the state before it, the corrections d[i] = beta[i]
(v[i] - k[i] S'[i]) solve (1 + A) d = beta (v - exp(g) k S), A[i, j] = beta[i] k[i] k[j] exp(g[i] - g[j]) below the
diagonal (arXiv 2412.06464 section 3.3, 2406.06484 section 3). The solution is linear in S, so both parts of it are had
for all chunks at once; only two products a chunk wait for the state before.

Shapes: B sequences, n chunks of C tokens, K key heads, G value heads a key head, D width of a key, E of a value,
W = E + D.
"""

from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from moeplan.kernels.delta_rule_reference import DeltaTokens, unit
from moeplan.kernels.document_chunks import chunks_of_heads, decays_between, tokens_of_chunks


class Scan(Protocol):
    """A back end: arguments of :func:`scan`, differentiable in all tensors."""

    def __call__(
        self, solved_BnKGCW: Tensor, keys_BnKGCD: Tensor, left_BnKG: Tensor, starts: frozenset[int]
    ) -> tuple[Tensor, Tensor]: ...


def scan(
    solved_BnKGCW: Tensor, keys_BnKGCD: Tensor, left_BnKG: Tensor, starts: frozenset[int]
) -> tuple[Tensor, Tensor]:
    """The state before each chunk [B, n, K, G, D, E], and the corrections [B, n, K, G, C, E] of its tokens.

    ``solved``: corrections for a state of zeros, and beside them what each channel of the state takes from them.
    ``keys`` as they reach the chunk's end, ``left`` what that leaves of the state. ``starts``: chunks that begin with a
    state of zeros.
    """
    width = solved_BnKGCW.shape[-1] - keys_BnKGCD.shape[-1]
    chunks = zip(*(x.unbind(1) for x in (solved_BnKGCW, keys_BnKGCD.mT, left_BnKG[..., None, None])), strict=True)
    state = zeros = solved_BnKGCW.new_zeros((*keys_BnKGCD[:, 0].shape[:3], keys_BnKGCD.shape[-1], width))
    states, corrections = [], []
    for index, (solved, key, left) in enumerate(chunks):
        if index in starts:
            state = zeros
        correction = solved[..., :width] - solved[..., width:] @ state
        states.append(state)
        corrections.append(correction)
        state = state * left + key @ correction
    return torch.stack(states, 1), torch.stack(corrections, 1)


def gated_delta_rule(tokens: DeltaTokens, documents: tuple[int, ...], chunk_size: int, scan: Scan = scan) -> Tensor:
    """See :func:`moeplan.kernels.delta_rule.gated_delta_rule`."""
    dtype, num_key_heads = torch.promote_types(tokens.value.dtype, torch.float32), tokens.key.shape[2]
    chunk_size = min(chunk_size, max(documents))
    of_chunks = DeltaTokens(*(chunks_of_heads(x, documents, chunk_size, num_key_heads, dtype) for x in tokens))
    starts = frozenset(accumulate((-(-length // chunk_size) for length in documents), initial=0))
    out_BnKGCE = _run(of_chunks, starts, scan)
    return tokens_of_chunks(out_BnKGCE, documents, chunk_size).to(tokens.value.dtype)


def _run(chunks: DeltaTokens, starts: frozenset[int], scan: Scan) -> Tensor:
    """out_BnKGCE."""
    q_BnK1CD, k_BnK1CD, v_BnKGCE = unit(chunks.query), unit(chunks.key), chunks.value
    q_BnK1CD = q_BnK1CD * q_BnK1CD.shape[-1] ** -0.5
    beta_BnKGC1, so_far_BnKGC = chunks.beta[..., None], chunks.log_decay.cumsum(-1)
    between_BnKGCC = decays_between(so_far_BnKGC)
    before_BnKGC1 = so_far_BnKGC.exp()[..., None]
    after_BnKGC1 = (so_far_BnKGC[..., -1:] - so_far_BnKGC).exp()[..., None]
    scores_BnKGCC = (q_BnK1CD @ k_BnK1CD.mT) * between_BnKGCC
    system_BnKGCC = (k_BnK1CD @ k_BnK1CD.mT) * between_BnKGCC * beta_BnKGC1  # of which the diagonal is not read
    sides = torch.cat([v_BnKGCE * beta_BnKGC1, k_BnK1CD * (beta_BnKGC1 * before_BnKGC1)], -1)
    solved = torch.linalg.solve_triangular(system_BnKGCC, sides, upper=False, unitriangular=True)
    states, corrections = scan(solved, k_BnK1CD * after_BnKGC1, before_BnKGC1[..., -1, 0], starts)
    out_BnKGCE: Tensor = (q_BnK1CD * before_BnKGC1) @ states + scores_BnKGCC @ corrections
    return out_BnKGCE
