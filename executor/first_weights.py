"""Where a run's first weights come from: drawn, a Hugging Face checkpoint, or a dense one that is upcycled."""

from pathlib import Path

from moeplan.executor.import_hf import HfWeights
from moeplan.executor.parameters import WeightSource
from moeplan.executor.upcycle import UpcycledWeights
from moeplan.hf_folder import check_model, open_folder
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from moeplan.upcycling import check_upcycling


def first_weights(plan: Plan, run: RunConfig) -> WeightSource | None:
    """What gives this rank its parts of the first weights; None where they are drawn, or come from a checkpoint.

    InvalidInputError where the folder of ``init_from`` does not hold what the plan's model needs.
    """
    if not run.init_from or run.resume:
        return None
    folder = open_folder(Path(run.init_from))
    if run.upcycle:
        check_upcycling(folder, plan.model)
        return UpcycledWeights(folder, plan.model, run.seed)
    check_model(folder, plan.model)
    return HfWeights(folder)
