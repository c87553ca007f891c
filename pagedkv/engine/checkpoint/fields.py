"""Fields: the values of a JSON object, checked for type and range where they are read. Knows no model.

An error names file, field and value, and what the value must be. Limits are far beyond any model, so that arithmetic on
checked values cannot overflow: weights are compared with the shards before memory is allocated.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any, Final

from pagedkv.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST: Final = 2**31 - 1
MOST_NUMBER: Final = 1e30
LEAST_NUMBER: Final = 1e-30
"""Limits of integers and numbers."""

NULLABLE: Final = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Fields in which a null is a value: off."""


def shown(value: object) -> str:
    """Return a value for an error: its repr, shortened."""
    return reprlib.repr(value)


class Fields:
    """The fields of one object of config.json, checked for type and range. Errors name file, field and value."""

    def __init__(self, values: dict[str, Any], where: str, *, defaults: Mapping[str, Any] | None = None) -> None:
        """defaults: of absent fields. A null counts as absent, except where it switches off a default (NULLABLE)."""
        present = {key: value for key, value in values.items() if value is not None or key in NULLABLE}
        self.values: dict[str, Any] = {**(defaults or {}), **present}
        self.where: str = where

    def bad(self, name: str, must: str) -> CheckpointError:
        """Return the error for a field that is missing or wrong; `must` says what the field must be."""
        found = f"is {shown(self.values[name])}" if name in self.values else "is missing"
        return CheckpointError(f"{self.where}: {name} {found}; it must be {must}")

    def integer(self, name: str, default: int | None = None, *, most: int = MOST) -> int:
        """Return an integer from 1 to `most`."""
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.bad(name, f"an integer from 1 to {most:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number from 0 to MOST_NUMBER."""
        value = self.values.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= MOST_NUMBER:
            raise self.bad(name, f"a number from 0 to {MOST_NUMBER:g}")
        return float(value)

    def positive(self, name: str, default: float | None = None, *, least: float = LEAST_NUMBER) -> float:
        """Return a number from `least` to MOST_NUMBER."""
        value = self.number(name, default)
        if value < least:
            raise self.bad(name, f"a number from {least:g} to {MOST_NUMBER:g}")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return `count` numbers from LEAST_NUMBER to MOST_NUMBER."""
        found = self.values.get(name)
        if not isinstance(found, list) or len(found) != count:
            raise self.bad(name, f"a list of {count} numbers")
        each = Fields({f"{name}[{i}]": value for i, value in enumerate(found)}, self.where)
        return tuple(each.positive(one) for one in each.values or (f"{name}[0]",))

    def positive_or(self, name: str, default: float) -> float:
        """Return a number from LEAST_NUMBER to MOST_NUMBER; `default` for 0 or an absent field."""
        return self.positive(name, default) if self.number(name, default) else default

    def cap(self, name: str) -> float:
        """Return a soft cap: a number above 0, or 0.0 for a null or absent field."""
        return 0.0 if self.values.get(name) is None else self.positive(name)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def choice(self, name: str, default: str, among: tuple[str, ...]) -> str:
        """Return one of the strings `among`."""
        value = self.values.get(name, default)
        if not isinstance(value, str) or value not in among:
            raise self.bad(name, f"one of {', '.join(among)}")
        return value
