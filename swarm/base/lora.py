"""Adapters that are trained instead of the model, as a run's configuration describes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Lora(BaseModel):
    """Adapters of low rank that are trained instead of the model (arXiv 2106.09685)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    r: int = Field(8, ge=1, le=4096, description="rank")
    alpha: float = Field(16.0, gt=0, description="the adapter's output is multiplied with alpha / r")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the adapter")
    bits: Literal[4, 8] | None = Field(None, description="keep the frozen linear layers in so many bits (4 needs a GPU)")
    targets: tuple[str, ...] = Field((), description="last parts of layers' names; all linear ones but the head if empty")

    @field_validator("bits", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isdigit() else value

    @field_validator("targets", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return [part for part in value.split("+") if part] if isinstance(value, str) else value
