"""The short convolution of documents by torch's own. Shapes as in causal_conv.py."""

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_conv(x_BSC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, documents: tuple[int, ...]) -> Tensor:
    """See :func:`moeplan.kernels.causal_conv.causal_conv`."""
    num_channels, before = weight_CK.shape[0], weight_CK.shape[1] - 1
    parts = [F.pad(part, (0, 0, before, 0)) for part in x_BSC.split(documents, 1)]
    padded_BCP = torch.cat(parts, 1).transpose(1, 2)
    summed_BCP = F.conv1d(padded_BCP, weight_CK[:, None], bias_C, groups=num_channels)
    # The last taps of one document reach the first tokens of the next: outputs there belong to nobody.
    sizes = [size for length in documents for size in (length, before)][:-1]
    return F.silu(torch.cat(summed_BCP.split(sizes, 2)[::2], 2).transpose(1, 2))
