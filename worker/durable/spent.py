"""Cost of a call: the arguments of `ctx.spend`, and the stored form."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

import orjson

from ...queues.budgets.definition import to_amount
from ...queues.envelope import MAX_AMOUNT
from ..errors import StepDefinitionError
from .prices import Usage, is_money


class Spent(NamedTuple):
    """Checked arguments of `ctx.spend`. amounts: by unit, as budgets count them. model: the price of it counts."""

    amounts: Mapping[str, int]
    model: str | None
    usage: Usage

    @classmethod
    def of(
        cls,
        tokens: int | None,
        input_tokens: int | None,
        output_tokens: int | None,
        usd: float | Decimal | None,
        model: str | None,
    ) -> Spent:
        """Check the arguments. Raises `StepDefinitionError`."""
        amounts = _checked(tokens, input_tokens, output_tokens, usd, model)
        return cls(amounts, model, Usage(input_tokens, output_tokens))


def _checked(tokens: object, input_tokens: object, output_tokens: object, usd: object, model: object) -> dict[str, int]:
    """Return the amounts of a call of `spend`. Raises `StepDefinitionError`."""
    counts = {"tokens": tokens, "input_tokens": input_tokens, "output_tokens": output_tokens}
    total = 0
    for name, count in counts.items():
        if count is None:
            continue
        if type(count) is not int or not 0 <= count <= MAX_AMOUNT:
            raise StepDefinitionError(f"{name} of ctx.spend must be a whole number, 0 or more, got {count!r}")
        total += count
    if tokens is not None and (input_tokens is not None or output_tokens is not None):
        raise StepDefinitionError("ctx.spend needs tokens=, or input_tokens= and output_tokens=, got both")
    if model is not None and not (isinstance(model, str) and model):
        raise StepDefinitionError(f"model of ctx.spend must be the name of a model, got {model!r}")
    amounts = {} if all(count is None for count in counts.values()) else {"tokens": total}
    if usd is not None:
        if not is_money(usd):
            raise StepDefinitionError(f"usd of ctx.spend must be a number of dollars, 0 or more, got {usd!r}")
        amounts["usd"] = nano_dollars(usd)
    if not amounts:
        raise StepDefinitionError("ctx.spend needs what was spent: tokens=, input_tokens= and output_tokens=, or usd=")
    return amounts


def nano_dollars(usd: Any) -> int:
    """Return dollars as budgets count them. Raises `StepDefinitionError` for too many."""
    try:
        return to_amount("usd", usd, "ctx.spend") if usd else 0
    except ValueError as error:
        raise StepDefinitionError(str(error)) from None


class Charge(NamedTuple):
    """Cost of one call.

    Attributes:
        step: Key of its step; empty outside of steps.
        tries: Number of the step's try.
        attempt: Attempt of the task.
        tokens: Of the call together; None if it has not said.
        usd: Dollars; None if they are not known.
        model: Name of the model; empty if it has not said.
    """

    step: str = ""
    tries: int = 1
    attempt: int = 1
    tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    usd: Decimal | None = None
    model: str = ""

    def encode(self) -> bytes:
        """Return the stored form."""
        usd = None if self.usd is None else str(self.usd)
        return orjson.dumps(self._replace(usd=None)._asdict() | {"usd": usd})

    @classmethod
    def decode(cls, data: bytes) -> Charge:
        """Read what `encode` returned. Raises `ValueError`."""
        match orjson.loads(data):
            case {"step": str(step), "tries": int(tries), "attempt": int(attempt), "model": str(model), **more}:
                tokens, given, returned = (_count(more, name) for name in ("tokens", "input_tokens", "output_tokens"))
                return cls(step, tries, attempt, tokens, given, returned, _dollars(more.get("usd")), model)
        raise ValueError("it is no charge")


def _count(data: Mapping[Any, object], name: str) -> int | None:
    found = data.get(name)
    if found is not None and (type(found) is not int or found < 0):
        raise ValueError(f"its {name} are no number of tokens")
    return found


def _dollars(text: object) -> Decimal | None:
    if text is None:
        return None
    try:
        found = Decimal(str(text))
    except ArithmeticError:
        raise ValueError("its dollars are no number") from None
    if not found.is_finite() or found < 0:
        raise ValueError("its dollars are no amount")
    return found
