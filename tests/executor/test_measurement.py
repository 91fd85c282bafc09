"""What a measurement says of itself."""

from moeplan.executor.measurement import notes_on
from moeplan.run_config import RunConfig
from moeplan.units import GIB
from tests.executor.cases import GQA_MODEL, tiny_plan


def test_memory_of_other_processes_is_named_where_a_context_cannot_explain_it() -> None:
    plan, run = tiny_plan(GQA_MODEL, 1), RunConfig()
    own, shared = (notes_on(plan, run, gib * GIB) for gib in (0.6, 37.0))
    assert own == notes_on(plan, run, 0)
    assert [note for note in shared if note not in own] == [
        "framework counts what other processes have on a GPU: 37.0 GiB of it were gone before the run began"
    ]
