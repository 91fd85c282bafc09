"""Tables lose no figure, however narrow the terminal."""

import pytest

from moeplan.report import output
from moeplan.report.tables import table, with_text_last


def test_a_narrow_terminal_cuts_no_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "WIDTH_WITHOUT_TERMINAL", 30)
    cells = ["deadbeef0123", "152.9 GiB", "88 %", "21632 tokens", "1724 TFLOP/s"]
    made = table(
        "Plans", ["plan", "memory", "used", "rate", "speed", "how"], [[*cells, "mxfp8, hybridep, recompute full"]]
    )
    output.out_console().print(with_text_last(made))
    printed = capsys.readouterr().out
    for cell in (*cells, "recompute full"):
        assert cell in printed
