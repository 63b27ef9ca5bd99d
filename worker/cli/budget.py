"""`perdure budget`: list and show what tasks have spent, raise budgets and reset them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Final

import typer

from ...queues.budgets.definition import UNITS, amounts_text, parse_amount
from ...queues.budgets.store import BudgetStore, Ledger
from ...queues.producer import Producer
from .support.connection import connected, where
from .support.errors import Misuse
from .support.options import Assured, By, confirm_act, login, parser
from .support.output import Column, Styled, Time, Value, note
from .support.runner import LiveListing, Output

app = typer.Typer(no_args_is_help=True, add_completion=False)

Which = Annotated[
    str,
    typer.Argument(
        metavar="BUDGET",
        help="Id of the task, name of the budget, or NAME:KEY as 'list' prints it.",
        show_default=False,
    ),
]


def _amount(unit: str, metavar: str, what: str) -> Any:
    read: Callable[[str], int] = parser(partial(parse_amount, unit))
    return typer.Option(metavar=metavar, parser=read, help=what, show_default=False)


@app.callback()
def budget() -> None:
    """List and show what tasks have spent; raise budgets, and reset them.

    A budget says what a task and what it spawns may spend, or all tasks that
    name it: @app.task(budget=Budget(usd=5, then="ask")). When it is used up,
    the task asks an operator, hands its work off, or becomes a dead letter.
    """


@app.command("list")
@connected
async def list_(
    producer: Producer,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this budget.", show_default=False)] = None,
) -> LiveListing:
    """List named budgets: what was spent of each key, and of how much.

    The last one that was charged comes first. A window that has ended is not
    listed; the next charge begins a new one. The budget of a single task is
    shown by 'perdure budget show' with the id of the task.

    Example: perdure budget list --watch
    """
    found = await BudgetStore(producer.gateway, producer.namespace).list_named(name)
    return LiveListing(_COLUMNS, found, empty=f"nothing was charged to a named budget {where(producer)}")


@app.command()
@connected
async def show(producer: Producer, which: Which) -> Output:
    """Show a budget: what was spent, what is left, and who raised it last.

    The budget of a task counts what its children and its successors spend.

    Example: perdure budget show 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    """
    return _shown(await _find(producer, which))


@app.command("raise")
@connected
async def raise_(
    producer: Producer,
    which: Which,
    *,
    tokens: Annotated[int | None, _amount("tokens", "N", "Tokens to add.")] = None,
    usd: Annotated[int | None, _amount("usd", "AMOUNT", "Dollars to add.")] = None,
    steps: Annotated[int | None, _amount("steps", "N", "Steps to add.")] = None,
    seconds: Annotated[int | None, _amount("seconds", "DURATION", "Time to add, such as 10m.")] = None,
    by: By = None,
) -> Output:
    """Add amounts to a budget, and wake the tasks that wait for it.

    They are added to the budget of the code. In a budget with a window they
    are for the current one. A task that waits for an operator goes
    on, as if its question had been answered. Prints what 'show' prints.

    Example: perdure budget raise tenant:5f3a9c0d1e2b4a67 --usd 20
    """
    given = {"tokens": tokens, "usd": usd, "steps": steps, "seconds": seconds}
    amounts = {unit: amount for unit, amount in given.items() if amount is not None}
    if not amounts:
        raise Misuse("give what to add: --tokens, --usd, --steps or --seconds")
    ledger = await _find(producer, which)
    unlimited = [unit for unit in amounts if unit not in ledger.limits]
    if unlimited:
        limited = ", ".join(f"--{unit}" for unit in UNITS if unit in ledger.limits)
        raise Misuse(f"budget {ledger.ledger} does not limit {' and '.join(unlimited)}: give {limited}")
    store = BudgetStore(producer.gateway, producer.namespace)
    await store.raise_(ledger.ledger, amounts, by=login() if by is None else by)
    note(f"added {amounts_text(amounts)} to budget {ledger.ledger}")
    return _shown(await _find(producer, ledger.ledger))


@app.command()
@connected
async def reset(producer: Producer, which: Which, *, by: By = None, assured: Assured = False) -> Output:
    """Let a budget begin again: nothing counts as spent, and raises are forgotten.

    What was spent is kept as a total that 'show' prints. Tasks that wait for
    the budget go on.

    Example: perdure budget reset nightly
    """
    ledger = await _find(producer, which)
    if not assured:
        what = f"Let budget {ledger.ledger} begin again, of which {amounts_text(ledger.spent)} was spent?"
        confirm_act(what, "resets a budget", "nothing was changed")
    await BudgetStore(producer.gateway, producer.namespace).reset(ledger.ledger, by=login() if by is None else by)
    return _shown(await _find(producer, ledger.ledger))


async def _find(producer: Producer, which: str) -> Ledger:
    return await BudgetStore(producer.gateway, producer.namespace).find(which)


def _shown(ledger: Ledger) -> Output:
    units = [unit for unit in UNITS if unit in ledger.limits or unit in ledger.spent or unit in ledger.total]
    fields: dict[str, Value] = {
        "budget": ledger.name or None,
        "task": None if ledger.name else ledger.ledger,
        "ledger": ledger.ledger if ledger.name else None,
        "key": ledger.label or None,
    }
    fields |= {unit: ledger.spent_text(unit) for unit in units}
    fields |= {
        "last charge": Time(ledger.at) if ledger.at else None,
        "window ends": Time(ledger.ends_ms) if ledger.ends_ms else None,
        "asks": ledger.asker.rpartition("task:")[2] or None,
        "raised by": ledger.by or None,
    }
    return Output(ledger.summary(), fields)


def _state(ledger: Ledger) -> Styled | None:
    return Styled("used up", "yellow") if ledger.used_up else None


def _used(ledger: Ledger, unit: str) -> str | None:
    return ledger.spent_text(unit) if unit in ledger.limits else None


_COLUMNS: Final[Sequence[Column[Ledger]]] = (
    Column("budget", lambda ledger: ledger.ledger, least=12, fold=True),
    Column("key", lambda ledger: ledger.label or None, least=8),
    Column("tokens", lambda ledger: _used(ledger, "tokens"), right=True),
    Column("usd", lambda ledger: _used(ledger, "usd"), right=True),
    Column("steps", lambda ledger: _used(ledger, "steps"), right=True),
    Column("time", lambda ledger: _used(ledger, "seconds"), right=True),
    Column("last charge", lambda ledger: Time(ledger.at)),
    Column("window ends", lambda ledger: Time(ledger.ends_ms) if ledger.ends_ms else None),
    Column("state", _state, least=7),
)
