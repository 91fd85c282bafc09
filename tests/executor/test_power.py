"""Readings of power beside the steps: what is kept, and that a driver which refuses them ends no run."""

import pytest
import torch

from moeplan.executor.power import PowerSamples

GPU = torch.device("cuda", 0)


class RefusedError(Exception):
    """As the driver's library raises: no RuntimeError."""


def test_a_cpu_has_no_readings() -> None:
    samples = PowerSamples()
    samples.sample(torch.device("cpu"))
    assert samples.provenance() == {}


def test_means_of_the_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([690_000, 710_000])
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: next(readings))
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda _: 1755)
    samples = PowerSamples()
    samples.sample(GPU)
    samples.sample(GPU)
    assert samples.provenance() == {"mean_power": "700 W over 2 readings", "sm_clock": "1755 MHz"}


def test_a_driver_that_refuses_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def refuse(device: torch.device) -> int:
        asked.append(device)
        raise RefusedError("Not Supported")

    monkeypatch.setattr(torch.cuda, "power_draw", refuse)
    samples = PowerSamples()
    samples.sample(GPU)
    samples.sample(GPU)
    assert len(asked) == 1
    assert samples.provenance() == {"mean_power": "not measured: RefusedError: Not Supported"}
