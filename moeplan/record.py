"""Base of every type that people write in files."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Frozen, finite numbers only; an unknown key is an error, so that a typing mistake is never silently ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A checked copy. Pydantic's own would skip validation and carry over values cached from the old fields."""
        return type(self).model_validate(
            {name: getattr(self, name) for name in type(self).model_fields} | dict(update or {})
        )
