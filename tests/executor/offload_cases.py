"""What workers of the offload tests run: as the folding tests, with tiny tensors sent to the host as well."""

from typing import Any

from moeplan.executor import offload
from tests.executor.folding_cases import Ran, train_folded


def train_sending_everything(rank: int, model: str, num_gpus: int, changes: dict[str, Any]) -> Ran:
    """:func:`train_folded` where no tensor is too small to be sent."""
    offload.MIN_BYTES = 1
    return train_folded(rank, model, num_gpus, changes)
