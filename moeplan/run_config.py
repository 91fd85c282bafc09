"""What does not change cost: data, seed, learning rate, steps, reporting."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from moeplan.record import Record


class RunConfig(Record):
    """Settings of a run.

    ``data``: a flat token file, a Megatron pair .bin and .idx (named with or without suffix), or empty for the
    standard library's sources as bytes. ``data_dtype`` is that of a flat file.
    """

    steps: PositiveInt = 50
    warmup_steps_untimed: int = Field(default=3, ge=0, description="first steps left out of the timing")
    seed: int = 1234
    data: str = ""
    data_dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    data_mix: dict[str, PositiveFloat] = Field(
        default={}, description="instead of data: several of them, each with its share of the sequences"
    )
    data_order: Literal["random", "shuffled"] = Field(
        default="random", description="where a sequence begins: anywhere, or each place once before any comes again"
    )
    separate_documents: bool = Field(
        default=False,
        description="attention and positions begin anew at each document of a pair, and none predicts the next",
    )
    lr: PositiveFloat = 1e-3
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        default="cosine", description="after the warm-up; wsd: at the peak, then down over lr_cooldown_steps"
    )
    lr_warmup_steps: int = Field(default=5, ge=0)
    lr_decay_steps: int = Field(default=0, ge=0, description="steps of the whole schedule; 0: those of the run")
    lr_cooldown_steps: int = Field(default=0, ge=0, description="last steps of a wsd schedule, on which it falls")
    min_lr_frac: float = Field(default=0.1, ge=0, le=1)
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: PositiveFloat = 1e-8
    weight_decay: float = Field(default=0.1, ge=0)
    clip_grad_norm: float = Field(default=1.0, ge=0, description="0: no clipping")
    profile_steps: int = Field(default=2, ge=0, description="steps traced at the end for time by op family")
    log_every: PositiveInt = 1
    eval_data: str = Field(default="", description="data for validation; empty: the last twentieth of each file")
    eval_batches: PositiveInt = Field(default=1, description="global batches of one validation")
    eval_every: int = Field(default=0, ge=0, description="steps between validations on held-out data; 0: none")
    init_from: str = Field(default="", description="folder of Hugging Face weights to begin with")
    upcycle: bool = Field(default=False, description="init_from is dense: its MLPs become the experts")
    force_balance: bool = Field(default=False, description="random experts, level in expectation: for benchmarks")
    record_routing: str = Field(default="", description="folder for the experts that every token of every step takes")
    replay_routing: str = Field(default="", description="folder of such a record, to take the same experts again")
    export_hf: str = Field(default="", description="folder for the trained weights as Hugging Face reads them")
    save_folder: str = Field(default="", description="of checkpoints; the last step is always saved there")
    save_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: only the last")
    keep_checkpoints: int = Field(default=0, ge=0, description="newest ones that are kept; 0: all of them")
    save_async: bool = Field(default=False, description="write checkpoints beside training, from a copy on the host")
    resume: bool = Field(default=False, description="go on from the latest checkpoint of save_folder")
    auto_resume: bool = Field(default=False, description="resume where save_folder has a checkpoint, else begin")
    log_folder: str = Field(default="", description="for a line a step as CSV and JSON, and TensorBoard if installed")
    log_balance: bool = Field(default=False, description="also the load of the busiest expert over the mean")
    spike_factor: float = Field(
        default=0.0, ge=0, description="a gradient norm above this many times its recent median is a spike; 0: none is"
    )
    skip_spikes: bool = Field(default=False, description="leave the update of a spike out instead of stopping there")
    hang_timeout_s: PositiveFloat = Field(default=600.0, description="without progress in a step before the run ends")
    deterministic: bool = Field(
        default=False, description="only kernels that give the same bits each time: a resumed run repeats itself"
    )

    def __hash__(self) -> int:
        """By value: ``data_mix`` is a table, which has no hash of its own."""
        return hash(self.model_dump_json())
