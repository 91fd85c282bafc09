"""The gated delta rule by the Triton kernels of the package flash-linear-attention. Shapes as in delta_rule.py."""

from functools import lru_cache
from importlib import import_module
from itertools import accumulate

import torch
from torch import Tensor

from moeplan.kernels.delta_rule_reference import DeltaTokens


def gated_delta_rule(tokens: DeltaTokens, documents: tuple[int, ...], chunk_size: int = 64) -> Tensor:
    """See :func:`moeplan.kernels.delta_rule.gated_delta_rule`; half precision alone, states in fp32, chunks of 64.

    All documents of all sequences go in as one: where lengths differ, the library wants a batch of one. Heads of keys
    are repeated, as only its later releases share them.
    """
    del chunk_size
    rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    q_BSKD, k_BSKD, v_BSVE, log_decay_BSV, beta_BSV = tokens
    share, batch = v_BSVE.shape[2] // k_BSKD.shape[2], len(v_BSVE)
    q_BSVD, k_BSVD = (x.repeat_interleave(share, 2) for x in (q_BSKD, k_BSKD))
    whole = [x.flatten(0, 1)[None].contiguous() for x in (q_BSVD, k_BSVD, v_BSVE, log_decay_BSV.float(), beta_BSV)]
    ends = _document_ends(documents * batch, v_BSVE.device)
    out_1TVE, _ = rule(*whole, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)
    out_BSVE: Tensor = out_1TVE[0].unflatten(0, (batch, -1))
    return out_BSVE


@lru_cache(maxsize=64)
def _document_ends(documents: tuple[int, ...], device: torch.device) -> Tensor:
    """Where documents begin, and the last one ends. Made once, as a CUDA graph takes no copy from the host."""
    return torch.tensor(list(accumulate(documents, initial=0)), device=device)
