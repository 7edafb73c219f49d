"""What clients ask for by tools and structured output: bounded, so that a small model's answer ends by itself."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["CONTENT", "Weather"]

CONTENT = "def weather(city, days):"
"""Of the message that asks."""


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(min_length=1, max_length=8, pattern="^[A-Za-z]+$")
    days: int = Field(ge=1, le=14)
    unit: Literal["C", "F"]
