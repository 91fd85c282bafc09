"""The short convolution before a recurrence: each channel looks at its own last few tokens, of its document alone.

Shapes: B sequences of S positions, C channels, K taps.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.executor.context import Documents


def causal_conv(x_BSC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, documents: Documents) -> Tensor:
    """SiLU of sum_k weight[k] x[t - K + 1 + k] + bias; before a document's first token there are zeros.

    ``documents``: lengths of those that fill a sequence.
    """
    num_channels, before = weight_CK.shape[0], weight_CK.shape[1] - 1
    parts = [F.pad(part, (0, 0, before, 0)) for part in x_BSC.split(documents, 1)]
    padded_BCP = torch.cat(parts, 1).transpose(1, 2)
    summed_BCP = F.conv1d(padded_BCP, weight_CK[:, None], bias_C, groups=num_channels)
    # The last taps of one document reach the first tokens of the next: outputs there belong to nobody.
    sizes = [size for length in documents for size in (length, before)][:-1]
    return F.silu(torch.cat(summed_BCP.split(sizes, 2)[::2], 2).transpose(1, 2))


def fresh_taps(uniform_CK: Tensor) -> Tensor:
    """First weights from uniform draws, as torch's convolutions have them: up to 1 / sqrt(K) either way."""
    return uniform_CK.mul_(2).sub_(1).mul_(uniform_CK.shape[1] ** -0.5)
