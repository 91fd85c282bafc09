"""Error bars by hand: each cost counts by its seconds."""

import pytest

from moeplan.simulator.doubt import _weigh
from moeplan.simulator.op import Cost


def test_errors_and_shares_are_weighed_by_seconds() -> None:
    measured = Cost(seconds=1.0, bound="compute", source="measured", error_frac=0.1)
    assumed = Cost(seconds=1.0, bound="hbm", source="assumed", error_frac=0.5, note="a rule")
    found = _weigh([(3.0, measured), (1.0, assumed)])
    assert found.error_bar_frac == pytest.approx((3 * 0.1 + 1 * 0.5) / 4)
    assert found.source_shares == {"assumed costs": "25.0% of busy time", "measured costs": "75.0% of busy time"}
    assert found.notes == ("assumed: a rule (25.0% of busy time)",)
