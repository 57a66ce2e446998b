"""The base class of all groups of settings. Most packages declare their groups in a module `settings`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A group of settings: frozen, strictly typed, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def as_list(value: Any) -> Any:
    """Wrap a single value in a list. Return lists and tuples unchanged."""
    return value if isinstance(value, list | tuple) else [value]


AsList = BeforeValidator(as_list)
Names = Annotated[tuple[str, ...], AsList, Field(strict=False)]
