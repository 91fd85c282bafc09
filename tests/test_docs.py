"""Every setting of a run is described where users look for it."""

import re
from pathlib import Path

from moeplan.run_config import RunConfig

TRAINING = Path(__file__).parents[1] / "docs" / "training.md"


def test_the_table_of_settings_has_each_once() -> None:
    table = TRAINING.read_text(encoding="utf-8").split("## Settings of a run")[1].split("\n## ")[0]
    firsts = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = [key for first in firsts for key in re.findall("`([a-z0-9_]+)`", first)]
    assert sorted(named) == sorted(RunConfig.model_fields)
