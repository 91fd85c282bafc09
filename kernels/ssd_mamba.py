"""The recurrence of Mamba-2 by the Triton kernels of the package mamba_ssm. Shapes as in ssd.py."""

from importlib import import_module

import torch
from torch import Tensor

from moeplan.kernels.ssd_reference import SsdHeads, SsdTokens


def ssd(tokens: SsdTokens, heads: SsdHeads, documents: tuple[int, ...], chunk_size: int) -> Tensor:
    """See :func:`moeplan.kernels.ssd.ssd`; states in fp32."""
    scan = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    x_BSHP, step_BSH, k_BSGN, q_BSGN = tokens
    document_BS = None
    if len(documents) > 1:
        # Filled on the device: a CUDA graph has no place for copies of pageable memory.
        numbers = [step_BSH.new_full((length,), number, dtype=torch.int32) for number, length in enumerate(documents)]
        document_BS = torch.cat(numbers).expand(len(x_BSHP), -1).contiguous()
    out_BSHP: Tensor = scan(
        x_BSHP, step_BSH, heads.rate.float(), k_BSGN, q_BSGN, chunk_size, D=heads.skip.float(), seq_idx=document_BS
    )
    return out_BSHP
