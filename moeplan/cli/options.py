"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
ModelName = Annotated[str, typer.Option("--model", help="Preset, .toml file, or Hugging Face config.json.")]
Stack = Annotated[
    str,
    typer.Option("--stack", help="Engine and release (moeplan stacks): default native on a CPU profile, else Bridge."),
]
Fix = Annotated[str, typer.Option("--fix", help="Pin axes: tp=1,pp=8,precision=bf16,recompute=layernorm+moe_act.")]
SeqLen = Annotated[int, typer.Option("--seq-len", min=1, help="Tokens of one sequence.")]
BatchSize = Annotated[int, typer.Option("--global-batch-size", min=1, help="Sequences of one optimizer step.")]
PlanFile = Annotated[Path, typer.Argument(help="Plan TOML, as written by search --out.")]
