"""Base of every type that people write in files."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Frozen, finite numbers only; an unknown key is an error, so that a typing mistake is never silently ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
