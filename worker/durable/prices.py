"""Prices of model calls in dollars: those of the app (`App(prices=...)`), else those of genai-prices."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from decimal import Decimal
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from ...queues.errors import ConfigurationError


class Usage(NamedTuple):
    """Tokens of a model call, as `prices` of an app gets them. None for a number that `ctx.spend` was not given."""

    input_tokens: int | None = None
    output_tokens: int | None = None


Price: TypeAlias = "float | Decimal | None"

Prices: TypeAlias = Callable[[str, Usage], "Price | Awaitable[Price]"]
"""Returns the dollars that a call of a model costs, from its name and its tokens; None for an unknown model."""


async def price_of(prices: Prices | None, model: str, usage: Usage) -> float | Decimal:
    """Return the dollars that a call of a model costs. Raises `ConfigurationError` if nothing knows its price."""
    if usage == (None, None):
        raise ConfigurationError(
            f"the price of a call of model {model!r} needs its tokens: pass input_tokens= and output_tokens= to "
            "ctx.spend, or usd="
        )
    if prices is None:
        return await asyncio.to_thread(_public_price, model, usage)  # the first import takes a second
    found: Any = prices(model, usage)
    if inspect.isawaitable(found):
        found = await found
    if found is None:
        raise ConfigurationError(f"prices of the app returned no price of model {model!r}: add it, or pass usd=")
    if not is_money(found):
        raise ConfigurationError(f"prices of the app must return dollars, 0 or more, got {found!r} for {model!r}")
    return found


def is_money(given: object) -> TypeGuard[float | Decimal]:
    """Whether a value is a number of dollars, 0 or more."""
    if isinstance(given, Decimal):
        return given.is_finite() and given >= 0
    return isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given < math.inf


def _public_price(model: str, usage: Usage) -> Decimal:
    """Return the public price of a call of a model, as the installed genai-prices knows it."""
    try:
        library = import_module("genai_prices")
    except ImportError:
        raise ConfigurationError(
            f"the price of model {model!r} is not known: pass usd= to ctx.spend, or prices= to the app, or install "
            "'perdure[prices]'"
        ) from None
    tokens = library.Usage(input_tokens=usage.input_tokens or 0, output_tokens=usage.output_tokens or 0)
    provider, slash, name = model.partition("/")
    names = {"provider_id": provider} if slash else {}
    try:
        price: Decimal = library.calc_price(tokens, name if slash else model, **names).total_price
    except LookupError:
        raise ConfigurationError(
            f"genai-prices does not know model {model!r}: pass usd= to ctx.spend, or prices= to the app"
        ) from None
    return price
