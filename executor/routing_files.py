"""Where records of routing lie: ``FOLDER/step-00000001/rank-00000.pt`` and so on. No torch."""

from pathlib import Path

from moeplan.errors import InvalidInputError
from moeplan.run_config import RunConfig


def step_folder(folder: Path, step: int) -> Path:
    """The records of one step, counted from 1, of every rank."""
    return folder / f"step-{step:08d}"


def check_replay(run: RunConfig) -> None:
    """Raise InvalidInputError where a run would replay what is not there, or is told to choose in two ways."""
    if not run.replay_routing:
        return
    if run.force_balance:
        raise InvalidInputError("force_balance: got true with replay_routing, allowed: one of them", "leave one out")
    last = step_folder(Path(run.replay_routing), run.steps)
    if not last.is_dir():
        raise InvalidInputError(
            f"replay_routing: {last} is not there, of a run of {run.steps} steps",
            "name the folder of a run with record_routing, of as many steps",
        )
