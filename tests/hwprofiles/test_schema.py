import pytest
from pydantic import ValidationError

from moeplan.hwprofiles.schema import DEFAULT_ERROR_FRAC, CollectiveCurve, GemmCurve, Provenance, Sourced


def _gemm(rows: list[float], flops_per_s: list[float]) -> GemmCurve:
    return GemmCurve.model_validate(
        {"dtype": "bf16", "rows": rows, "flops_per_s": flops_per_s, "source": "measured", "ref": "a GPU"}
    )


@pytest.mark.parametrize(
    "rows,flops_per_s,problem",
    [
        ([1, 2], [1e12], "2 sizes but 1 readings"),
        ([0, 2], [1e12, 1e12], "above 0"),
        ([1, 2], [1e12, 0], "above 0"),
        ([2, 2], [1e12, 2e12], "given twice"),
        ([], [], "at least 1 item"),
        ([1, float("inf")], [1e12, 1e12], "finite"),
    ],
)
def test_unsound_tables_are_refused(rows: list[float], flops_per_s: list[float], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        _gemm(rows, flops_per_s)


def test_rows_may_come_in_any_order() -> None:
    curve = _gemm([4096, 128], [800e12, 400e12]).curve
    assert curve.rate_at(128) == pytest.approx(400e12)
    assert curve.rate_at(4096) == pytest.approx(800e12)


def test_an_all_reduce_needs_two_ranks() -> None:
    table = {"collective": "all_reduce", "tier": "network", "message_bytes": [1], "seconds": [1]}
    with pytest.raises(ValidationError, match="num_ranks"):
        CollectiveCurve.model_validate({**table, "num_ranks": 1, "source": "measured", "ref": "a cluster"})


@pytest.mark.parametrize("bounds", [{"low": 3.0}, {"high": 1.0}, {"low": 0.0, "high": 1.9}])
def test_value_must_lie_in_its_range(bounds: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="outside low"):
        Sourced.model_validate({"value": 2.0, "source": "datasheet", "ref": "a page", **bounds})


def test_error_bar_is_the_stated_one_or_that_of_the_kind() -> None:
    for kind, error_frac in DEFAULT_ERROR_FRAC.items():
        assert Provenance.model_validate({"source": kind, "ref": "abc"}).error_bar_frac == error_frac
    assert Provenance(source="assumed", ref="abc", error_frac=0.0).error_bar_frac == 0.0
