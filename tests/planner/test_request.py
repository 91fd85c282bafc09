"""``--fix`` and ``--forbid``."""

import pytest

from moeplan.errors import InvalidInputError
from moeplan.planner.request import parse_forbidden, parse_pins


def test_pins_are_typed_values() -> None:
    pins = parse_pins("tp=1, pp=8,precision=mxfp8,recompute=moe_act+layernorm,layout=Et*4|tL", "--fix")
    assert pins == {
        "tp": 1,
        "pp": 8,
        "precision": "mxfp8",
        "recompute": ("layernorm", "moe_act"),
        "layout": "Et*4|tL",
    }
    assert parse_pins("recompute=none,memory_efficient_permutation=false", "--fix") == {
        "recompute": (),
        "memory_efficient_permutation": False,
    }
    assert parse_pins("", "--fix") == {}
    packed = parse_pins("cp_comm=a2a+p2p,cp_a2a_size=4,packed_lengths=8192+2048+4096", "--fix")
    assert packed == {"cp_comm": "a2a+p2p", "cp_a2a_size": 4, "packed_lengths": (8192, 2048, 4096)}


def test_forbidden_values_of_one_key_add_up() -> None:
    assert parse_forbidden("tp=4,tp=8,precision=mxfp8", "--forbid") == {"tp": (4, 8), "precision": ("mxfp8",)}


def test_dispatchers_go_by_the_name_that_tables_print() -> None:
    assert parse_pins("dispatcher=deepep", "--fix") == {"dispatcher": "flex", "flex_backend": "deepep"}
    assert parse_pins("dispatcher=alltoall", "--fix") == {"dispatcher": "alltoall"}
    assert parse_forbidden("dispatcher=deepep", "--forbid") == {"flex_backend": ("deepep",)}


@pytest.mark.parametrize(
    "text, named",
    [
        ("tp=1,tp=2", "tp is given twice"),
        ("tq=1", "tq"),
        ("tp", "key=value"),
        ("tp=", "key=value"),
        ("tp=0", "tp"),
        ("recompute=x", "x"),
    ],
)
def test_bad_pins_name_themselves(text: str, named: str) -> None:
    with pytest.raises(InvalidInputError, match="--fix") as raised:
        parse_pins(text, "--fix")
    assert named in raised.value.message
