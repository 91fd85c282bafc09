"""The recurrence of Mamba-2 in chunks of tokens, as matrix products (state-space duality, arXiv 2405.21060 section 6).

With g[i] the sum of log decays of a chunk's tokens up to i: inside a chunk out[i] = sum_j q[i] k[j] exp(g[i] - g[j])
dt[j] x[j] over j <= i, to which exp(g[i]) q[i] S adds what the state S before the chunk knows. States of chunks are
linear in those before them, so that all are had by one product over chunks.

Shapes: B sequences, n chunks of C tokens, G groups, H heads a group, P width of a value, N of a key.
"""

from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from moeplan.kernels.document_chunks import chunks_of_heads, decays_between, tokens_of_chunks
from moeplan.kernels.ssd_reference import SsdHeads, SsdTokens


def ssd(tokens: SsdTokens, heads: SsdHeads, documents: tuple[int, ...], chunk_size: int) -> Tensor:
    """See :func:`moeplan.kernels.ssd.ssd`. Padding has steps of 0: it neither decays a state nor adds to it."""
    dtype, num_groups = torch.promote_types(tokens.value.dtype, torch.float32), tokens.key.shape[2]
    chunk_size = min(chunk_size, max(documents))
    chunked = partial(chunks_of_heads, documents=documents, chunk_size=chunk_size, num_groups=num_groups, dtype=dtype)
    rate_H, skip_H = (one.to(dtype) for one in heads)
    decay_BnGHC = chunked(tokens.time_step.to(dtype) * rate_H)
    added_BnGHCP = chunked(tokens.value.to(dtype) * tokens.time_step.to(dtype)[..., None])
    k_BnG1CN, q_BnG1CN = chunked(tokens.key), chunked(tokens.query)
    counts = [-(-length // chunk_size) for length in documents]
    out_BnGHCP = _run(decay_BnGHC, added_BnGHCP, k_BnG1CN, q_BnG1CN, counts)
    out_BSHP = tokens_of_chunks(out_BnGHCP, documents, chunk_size) + skip_H[:, None] * tokens.value
    return out_BSHP.to(tokens.value.dtype)


def _run(decay_BnGHC: Tensor, x_BnGHCP: Tensor, k_BnG1CN: Tensor, q_BnG1CN: Tensor, counts: list[int]) -> Tensor:
    """out_BnGHCP; ``counts``: chunks of each document."""
    so_far_BnGHC = decay_BnGHC.cumsum(-1)
    whole_BnGH1 = so_far_BnGHC[..., -1:]
    scores_BnGHCC = (q_BnG1CN @ k_BnG1CN.mT) * decays_between(so_far_BnGHC)
    after_BnGHC1 = (whole_BnGH1 - so_far_BnGHC).exp()[..., None]
    own_BnGHNP = k_BnG1CN.mT @ (x_BnGHCP * after_BnGHC1)
    before_BnGHNP = _passed_on(own_BnGHNP, whole_BnGH1[..., 0], counts)
    out_BnGHCP: Tensor = scores_BnGHCC @ x_BnGHCP + (q_BnG1CN @ before_BnGHNP) * so_far_BnGHC.exp()[..., None]
    return out_BnGHCP


def _passed_on(own_BnGHNP: Tensor, decay_BnGH: Tensor, counts: list[int]) -> Tensor:
    """The state before each chunk, of what each chunk adds and by how much it decays: zeros before a document."""
    if len(counts) == own_BnGHNP.shape[1]:
        return torch.zeros_like(own_BnGHNP)
    is_seen_nn = decay_BnGH.new_zeros((sum(counts), sum(counts)), dtype=torch.bool)
    for first, end in pairwise(accumulate(counts, initial=0)):
        is_seen_nn[first:end, first:end] = True
    is_seen_nn = is_seen_nn.tril(-1)  # chunks before it in its document
    # In fp64: decays of all chunks add up to 1e5 and more, where fp32 knows the difference of neighbours to 1e-2.
    so_far_BGHn = decay_BnGH.movedim(1, -1).double().cumsum(-1)
    until_BGHn = so_far_BGHn - decay_BnGH.movedim(1, -1)
    between_BGHnn = (until_BGHn[..., None] - so_far_BGHn[..., None, :]).to(own_BnGHNP.dtype)
    left_BGHnn = between_BGHnn.masked_fill(~is_seen_nn, -torch.inf).exp()
    states_BGHnI: Tensor = left_BGHnn @ own_BnGHNP.movedim(1, 3).flatten(4)
    before_BGHnNP: Tensor = states_BGHnI.unflatten(4, own_BnGHNP.shape[4:])
    return before_BGHnNP.movedim(3, 1)
