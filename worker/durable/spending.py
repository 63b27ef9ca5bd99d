"""Spending of a run: what it charges to the budgets of its task, and what follows when one of them is used up.

A charge is confirmed before the step that made it is recorded, under a nonce of its own: a reply that is lost, or bytes
that come late, charge once. A step that is cut off between its charge and its record runs again, and charges again, for
its calls were made twice. Recorded steps run no code, and charge nothing.

A budget is looked at before a step starts that is not recorded, after `spend` outside a step, and before the handler of
a task that has recorded nothing: never within a step. The look is the reply of the last charge if that is new.

`bury` and `hand_off` end the run. `ask` asks a person: one task of those that share the budget opens a wait for an
answer, and the others look again by themselves. The wait is no call of the handler: its key follows from the budget,
and from how often that was raised. The answer raises the budget if it was not raised since the question; then the wait
is closed. A run that is cut off in between finds the budget raised, and closes the wait.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from ...queues.budgets.definition import task_budgets, to_amount
from ...queues.budgets.store import BudgetStore, Standing
from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.delivery.settlement import WakeCondition
from ...queues.envelope import BudgetUse
from ...queues.errors import BudgetNotFound, ConfigurationError, QueueError
from ...queues.keys import Namespace
from ...queues.limits.parked import wake_for_limit
from ...queues.runtime import RUNTIME
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.waits import Answer, closing, look_at_wait, opening
from ..errors import BudgetExceeded, first_problem
from ..log import log_wait, logger
from .answers import GONE, AnswerCame, AnswerCodec, Opened, describe_wait, void_here
from .budget_left import BudgetLeft, budget_text, used_text
from .call_records import record_charge
from .continuation import hand_off
from .joining import CHILDREN
from .journal.event import Event
from .journal.handoff.document import Handoff
from .journal.run_events import AnswerDropped, Answered, BudgetLow, Waited, WaitStarted
from .journal.step_record import StepRecord
from .prices import price_of
from .run import Run, RunObserver
from .spent import Spent, nano_dollars
from .steps.current import CURRENT_STEP, check_call, check_place
from .steps.keys import forget_steps
from .steps.matching import digest_of, match_call
from .stop_reasons import StopReason
from .waiting import OPEN, Condition, redis_time, wait_until

if TYPE_CHECKING:
    from ...queues.budgets.definition import TaskBudgets
    from .limit_tokens import ArgumentEncoder

T = TypeVar("T")

_SPEND: Final = "#spend"
"""Name of the records of charges outside of steps."""

_NAME: Final = "budget"
"""Name of the waits for a person that decides about a budget."""

_WHO: Final = "operator"
"""Person that is asked."""

_FRESH: Final = 1.0
"""Seconds for which the reply of a charge counts as a look."""

_LOOK: Final = 600.0
"""Seconds between two looks of a task that waits for a budget, if no raise wakes it before."""

_RAISED: Final[WakeCondition] = ("limit", "budget")
"""Condition under which a raise wakes a task: as the release of a token wakes those that wait for a limit."""

_LAST: Final = frozenset({StopReason.COMPLETED, StopReason.CANCELLED})
"""Ends of a run after which nothing charges to the budget of its task."""

_ORDER: Final = ("bury", "hand_off", "ask")
"""Order in which budgets that are used up are acted on."""


class BudgetAmounts(BaseModel):
    """Amounts by which a person raises a budget: the answer to the question of a task that has used one up."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra={"minProperties": 1})

    tokens: int | None = Field(default=None, gt=0)
    usd: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    steps: int | None = Field(default=None, gt=0)
    seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> BudgetAmounts:
        if not self.amounts():
            raise ValueError("it must have an amount: tokens, usd, steps or seconds")
        return self

    def amounts(self) -> dict[str, int]:
        """Return the amounts as budgets count them."""
        given = self.model_dump(exclude_none=True)
        return {unit: to_amount(unit, value) for unit, value in given.items()}


BudgetDecision = BudgetAmounts | Literal["deny"]
"""Answer to the question of a task that has used up a budget: amounts to add, or `"deny"`, which buries the task."""

_DECISION: Final = AnswerCodec(BudgetDecision)


class RunSpending:
    """The budgets of one run: its charges, its looks, and what follows when one is used up."""

    def __init__(
        self, run: Run, uses: Sequence[BudgetUse], store: BudgetStore, draft: Callable[..., Handoff], kept: float
    ) -> None:
        """draft: see `continue_as`. kept: seconds for which the record of the task is kept when it has ended."""
        self._draft = draft
        self.uses = tuple(uses)
        self._run = run
        self._store = store
        self._per_step = self.limits("steps") or self.limits("seconds")
        self._steps = 0
        """Started steps that are not charged yet."""
        self._charged = RUNTIME.monotonic()
        """Time until which the time of the run is charged."""
        self._token = RUNTIME.token(8)
        """Part of the nonces of its charges: a run after lost data may have the fencing token of an earlier one."""
        self._number = 0
        self._open: dict[str, Mapping[str, int]] = {}
        """Charges that are not confirmed, by nonce."""
        self._sending: set[str] = set()
        """Nonces of those that a call sends now."""
        self._standings: Sequence[Standing] = ()
        self._looked = -math.inf
        self._asked = False
        """Whether the task waits for a budget, as far as its checkpoint says."""
        self._notices: list[BudgetLow] = []
        """Notices that are not in the log of the task yet."""
        self._acting = asyncio.Lock()
        self._after = _SettledRun(store, self.uses, kept)
        run.observe(self._after)

    # charges

    async def charge(self, amounts: Mapping[str, int]) -> None:
        """Charge amounts, and the steps and the time that are not charged yet; return once it is confirmed.

        A charge whose call is cancelled is repeated with the next one, under its nonce.
        """
        self._put(amounts)
        await self._confirm()

    def _put(self, amounts: Mapping[str, int]) -> None:
        """Add a charge of these amounts, and of the steps and the time that are not charged yet."""
        now = RUNTIME.monotonic()
        given = dict(amounts)
        milliseconds = int((now - self._charged) * 1000)
        if milliseconds > 0:
            given["seconds"] = milliseconds
            self._charged += milliseconds / 1000
        if self._steps:
            given["steps"], self._steps = self._steps, 0
        if given:
            self._number += 1
            self._open[f"{self._token}.{self._number}"] = given

    async def _confirm(self) -> None:
        """Send the charges that no call sends now; one whose call was cancelled may be stored, and counts once."""
        left = {nonce: amounts for nonce, amounts in self._open.items() if nonce not in self._sending}
        self._sending.update(left)
        try:
            for nonce, amounts in left.items():
                standings = await self._repeat(partial(self._store.charge, self.uses, nonce, amounts))
                del self._open[nonce]
                self._take(standings)
        finally:
            self._sending.difference_update(left)

    def _take(self, standings: Sequence[Standing]) -> None:
        self._standings, self._looked = standings, RUNTIME.monotonic()
        for use, standing in zip(self.uses, standings, strict=True):
            if standing.notice:
                self._give_notice(use, standing)

    async def standings(self) -> Sequence[Standing]:
        """Return the standings of the budgets, which are at most a second old."""
        if RUNTIME.monotonic() - self._looked > _FRESH:
            await self.look()
        return self._standings

    async def look(self) -> Sequence[Standing]:
        """Return the standings of the budgets now."""
        self._take(await self._repeat(partial(self._store.charge, self.uses, "", {})))
        return self._standings

    async def left_now(self) -> BudgetLeft:
        """Return what is left of the budgets now."""
        return BudgetLeft.of(await self.look())

    def _give_notice(self, use: BudgetUse, standing: Standing) -> None:
        """Say that most of a budget is used: in the log of the worker, in that of the task, and by a webhook."""
        run, used = self._run, used_text(standing)
        bound = logger.bind(task=run.envelope.task, id=run.id, budget=standing.ledger)
        bound.warning("most of {} is used: {}", budget_text(use), used)
        self._notices.append(BudgetLow(budget=use.name, ledger=use.ledger, used=used))
        if run.host.notify is not None:
            data = {"budget": use.name, "ledger": use.ledger, "used": used}
            data |= {"summary": f"most of budget {use.ledger} is used: {used}"}  # without its key, which is encrypted
            run.host.notify(run, "budget", data | {"remedy": f"perdure budget show {use.ledger}"})

    # for the runtime and for steps

    async def begin(self) -> None:
        """Look at the budgets before the handler of a task that has recorded nothing, and has spawned no child."""
        history = self._run.history
        await history.read_unfinished(*(_wait_key(use) for use in self.uses))
        self._asked = any(_wait_key(use) in history.saved for use in self.uses)
        if not history.records and (self._asked or CHILDREN not in history.saved):
            await self.check()

    async def before_step(self) -> None:
        """Look at the budgets before a step that is not recorded."""
        await self.check()
        await self._run.check_stopped()

    def step_began(self) -> None:
        """Count a step."""
        self._steps += 1

    async def step_ended(self) -> None:
        """Charge a step that is about to be recorded, unless a charge within the step has done so."""
        if len(self._open) > len(self._sending) or (self._per_step and self._steps):
            await self.charge({})
        await self._log_notices()

    async def leave(self, *, lost: bool) -> None:
        """Charge what is not charged yet, when the handler has ended. lost: once, since the run has lost its lease."""
        self._put({})
        if not lost:
            await self._confirm()
            return
        with suppress(QueueError):
            charges = list(self._open.items())
            await asyncio.gather(*(self._store.charge(self.uses, nonce, amounts) for nonce, amounts in charges))

    async def _log_notices(self) -> None:
        while self._notices and not self._run.stopped:
            await self._run.log_event(self._notices.pop())

    def limits(self, unit: str) -> bool:
        """Whether a budget limits a unit."""
        return any(unit in use.limits for use in self.uses)

    async def _charge_once(self, spent: Spent, amounts: Mapping[str, int]) -> None:
        """Charge amounts of a call outside of steps, unless an earlier run has recorded it.

        The arguments identify the call: a price may be another one today.
        """
        run, given = self._run, [dict(spent.amounts), spent.model, list(spent.usage)]
        digest = digest_of(orjson.dumps(given, option=orjson.OPT_SORT_KEYS))
        key, recorded, former = await match_call(run, _SPEND, digest)
        if recorded is not None or former is not None:
            run.touch()
            return
        await self.charge(amounts)
        record = StepRecord(b"null", digest).encode()
        await run.recorder.put(Entry(Kind.DONE_WITH_EVENT, key, record), wait=False)
        await record_charge(run, spent, amounts)

    async def spend(self, spent: Spent, *, in_step: bool) -> BudgetLeft:
        """Charge what a call has cost, and return what is left; outside of steps, act if a budget is used up then."""
        amounts, unknown = dict(spent.amounts), None
        if spent.model is not None and "usd" not in amounts and self.limits("usd"):
            try:
                price = await price_of(self._run.host.prices, spent.model, spent.usage)
                amounts["usd"] = nano_dollars(price)
            except ConfigurationError as error:
                unknown = error
        if in_step:
            await self.charge(amounts)
            step = CURRENT_STEP.get()
            key, tries = ("", 1) if step is None else (step.key, step.attempt)
            await record_charge(self._run, spent, amounts, step=key, tries=tries)
        else:
            await self._charge_once(spent, amounts)
        if unknown is not None:  # after the tokens are charged
            raise unknown
        if not in_step:
            await self.check()
        return BudgetLeft.of(await self.standings())

    # budgets that are used up

    async def check(self) -> None:
        """Look at the budgets, and do what follows if one is used up: wait for a person, or end the run."""
        standings = await self.standings()
        while self._may_be_used_up(standings):
            await self.charge({})
            standings = await self.look()
        if self._asked or any(standing.used_up for standing in standings):
            async with self._acting:
                with self._run.calling():
                    await self._act()
        await self._log_notices()

    def _may_be_used_up(self, standings: Sequence[Standing]) -> bool:
        """Whether steps that have started and are not confirmed yet may use up what is left of a budget."""
        started = self._steps + sum(amounts.get("steps", 0) for amounts in self._open.values())
        left = [standing.left("steps") for standing in standings if "steps" in standing.limits]
        return started > 0 and bool(left) and 0 < min(left) <= started

    async def _act(self) -> None:
        run = self._run
        while True:
            await run.check_stopped()
            await self._log_notices()
            pairs = list(zip(self.uses, await self.look(), strict=True))
            used = [(use, standing) for use, standing in pairs if standing.used_up]
            for use, standing in pairs:
                if not standing.used_up:
                    await self._end_wait(use)
            if not used:
                self._asked = False
                return
            use, standing = min(used, key=lambda pair: _ORDER.index(pair[0].then))
            if use.then == "ask":
                await self._ask(use, standing)
            elif use.then == "hand_off" and use.to is not None:
                await self._hand_off(use, standing)
            else:
                await run.exhaust(BudgetExceeded(budget_text(use), use.ledger, used_text(standing)))

    async def _hand_off(self, use: BudgetUse, standing: Standing) -> NoReturn:
        why = f"{budget_text(use)} is used up: {used_text(standing)}"
        await hand_off(self._run, use, why, self._draft)

    # the wait for a person

    async def _ask(self, use: BudgetUse, standing: Standing) -> None:
        """Wait for an answer to a question about a budget, for a raise, or for its next window; meanwhile the run may
        park. Returns when it is worth another look.
        """
        run, key = self._run, _wait_key(use)
        asks = await self._repeat(
            partial(self._store.wait, use.ledger, run.delivery.partition, run.id, standing.raises)
        )
        if asks is None:  # raised, or its window has ended
            return
        now = await redis_time(run)
        saved = self._saved(use)
        if saved is None or saved["n"] != standing.raises or ("wait" in saved) is not asks:
            saved = await self._open_wait(use, standing, now, asks=asks)
        until = now + round(_LOOK * 1000)
        if standing.ends_ms is not None:
            until = min(until, max(standing.ends_ms, now))
        look = partial(self._was_raised, use, standing)
        self._after.wait_began(use.ledger, standing.raises)
        try:
            if asks:
                came = await wait_until(run, _AnsweredOrRaised(run, key, saved["wait"], until, look))
            else:
                came = await wait_until(run, _Raised(key, f"budget {use.ledger}", until, look))
        finally:
            if not run.stopped:
                self._after.wait_ended(use.ledger)
        if came is GONE:
            await self._open_wait(use, standing, now, asks=True)
        elif isinstance(came, Answer):
            await self._use_answer(use, standing, saved, came)

    async def _was_raised(self, use: BudgetUse, standing: Standing) -> bool:
        """Return whether a budget was raised since it was found used up, or another window has started."""
        (now,) = await self._store.charge([use], "", {})
        return now.raises != standing.raises or not now.used_up

    async def _open_wait(self, use: BudgetUse, standing: Standing, now: int, *, asks: bool) -> dict[str, Any]:
        """Open the wait of a task, in place of an earlier one. asks: whether it asks a person; else others do."""
        run, key = self._run, _wait_key(use)
        former = self._saved(use)
        entries: list[Entry] = []
        if former is not None and "wait" in former:
            entries += [closing(run.id, former["wait"]), run.next_entry(Waited(wait=former["wait"]))]
        saved: dict[str, Any] = {"n": standing.raises, "at": now}
        why = f"{budget_text(use)} is used up: {used_text(standing)}"
        if asks:
            wait = _wait_id(use, standing)
            shown = {"budget": use.name or use.ledger, "used": used_text(standing)}
            call = describe_wait(run, _NAME, BudgetDecision, who=_WHO, why=why, shows=shown)
            opened = Opened.of(run, wait, call)
            saved |= {"wait": wait, "question": opened.question}
            until = standing.ends_ms
            entries.append(opening(run.id, wait, opened.fields, until=until, early=False))
            entries.append(run.next_entry(WaitStarted(what="answer", on=_WHO, why=why, wait=wait, until=until)))
        else:
            entries.append(run.next_entry(WaitStarted(what=f"budget {use.ledger}", why=why)))
        data = run.history.saved[key] = orjson.dumps(saved)
        self._asked = True
        await run.recorder.put(Entry(Kind.SAVED, key, data), *entries, wait=True)
        return saved

    async def _use_answer(self, use: BudgetUse, standing: Standing, saved: dict[str, Any], answer: Answer) -> None:
        """Raise the budget as an answer says, or end the run; drop an answer that is void."""
        run, wait = self._run, saved["wait"]
        problem = void_here(run, wait, _WHO, saved["question"], answer)
        decided, problem = (None, problem) if problem else _read(answer, use)
        if problem:
            bound = logger.bind(task=run.envelope.task, id=run.id)
            bound.warning("an answer to wait {} was dropped, which stays open: {}", wait, problem)
            await run.log_event(AnswerDropped(wait=wait, by=answer.by, why=problem))
            await self._open_wait(use, standing, saved["at"], asks=True)
        elif isinstance(decided, BudgetAmounts):
            amounts = decided.amounts()
            act = partial(self._store.raise_, use.ledger, amounts, number=standing.raises, by=answer.by or _WHO)
            with suppress(BudgetNotFound):  # its window has ended
                await self._repeat(act)
            await self._end_wait(use, answer)
        else:  # the wait stays open: a run that is cut off before the burial finds the answer again
            await run.log_event(Answered(wait=wait, by=answer.by, value=answer.value))
            await run.exhaust(BudgetExceeded(budget_text(use), use.ledger, used_text(standing), answer.by or _WHO))

    async def _end_wait(self, use: BudgetUse, answer: Answer | None = None) -> None:
        """Close the wait for a budget that has room again. answer: the one that was used."""
        run, saved = self._run, self._saved(use)
        if saved is None:
            return
        event: Event = Waited()
        entries = forget_steps([_wait_key(use)], run.history)
        if (wait := saved.get("wait")) is not None:
            if answer is None:  # a run that was cut off may have used one
                look = partial(look_at_wait, run.gateway, run.delivery.partition, run.id, wait)
                answer = (await self._repeat(look)).answer
            event = Waited(wait=wait) if answer is None else Answered(wait=wait, by=answer.by, value=answer.value)
            entries.append(closing(run.id, wait, answer))
        await run.recorder.put(*entries, run.next_entry(event), wait=True)

    def _saved(self, use: BudgetUse) -> dict[str, Any] | None:
        data = self._run.history.saved.get(_wait_key(use))
        return None if data is None else orjson.loads(data)

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call while Redis is unavailable."""
        run = self._run
        return await retry_while_unavailable(call, on_wait=log_wait(f"the budgets of task {run.id}", run.touch))


class _Raised(Condition):
    """The condition that a budget was raised, for which another task has asked. look: returns whether it was."""

    __slots__ = ("_look",)

    def __init__(self, key: str, what: str, until: int, look: Callable[[], Awaitable[bool]]) -> None:
        super().__init__(key, what, until)
        self._look = look

    @property
    def parked(self) -> WakeCondition:
        return _RAISED

    async def look(self) -> Any:
        return True if await self._look() else OPEN


class _AnsweredOrRaised(AnswerCame):
    """The condition that a person has answered, or that the budget was raised otherwise."""

    __slots__ = ("_raised",)

    def __init__(self, run: Run, key: str, wait: str, until: int, look: Callable[[], Awaitable[bool]]) -> None:
        super().__init__(run, key, wait, until)
        self._raised = look

    @property
    def also(self) -> Sequence[WakeCondition]:
        return (*super().also, _RAISED)

    async def look(self) -> Any:
        found = await super().look()
        return True if found is OPEN and await self._raised() else found


class _SettledRun(RunObserver):
    """Handling of budgets after the outcome of a run is stored.

    A raise after a parked run had looked, and before it was parked, wakes nothing: it is looked for again. The ledger
    of a task that has ended is kept as long as its record.
    """

    __slots__ = ("_kept", "_store", "_uses", "_waiting")

    def __init__(self, store: BudgetStore, uses: Sequence[BudgetUse], kept: float) -> None:
        self._store = store
        self._uses = uses
        self._kept = kept
        self._waiting: dict[str, int] = {}

    def wait_began(self, ledger: str, number: int) -> None:
        """Note that the run waits for a budget. number: of its raises."""
        self._waiting[ledger] = number

    def wait_ended(self, ledger: str) -> None:
        self._waiting.pop(ledger, None)

    async def on_settled(self, run: Run, stop: StopReason, *, ended: bool) -> None:
        at = run.delivery.partition
        with suppress(QueueError):  # a parked task looks again by itself, and a ledger that is kept longer ends as well
            if stop is StopReason.PARKED:
                for ledger, number in self._waiting.items():
                    if await self._store.wait(ledger, at, run.id, number) is None:
                        await wake_for_limit(run.gateway, at, run.id)
            elif stop in _LAST and any(use.ledger == run.id for use in self._uses):
                await self._store.keep(run.id, self._kept)


def _digest(use: BudgetUse) -> str:
    return digest_of(use.ledger.encode())


def _wait_key(use: BudgetUse) -> str:
    """Return the key of what is saved while the task waits for a budget."""
    return f"#budget:{_digest(use)}"


def _wait_id(use: BudgetUse, standing: Standing) -> str:
    """Return the id of the wait for a person: another one after each raise, and in each window."""
    return f"{digest_of(f'{use.ledger} {standing.raises}'.encode())[:8]}/{_NAME}"


def _read(answer: Answer, use: BudgetUse) -> tuple[Any, str]:
    """Return a decision, and why it is void; empty if it is not."""
    try:
        decided = _DECISION.decode(orjson.dumps(answer.value))
    except ValidationError as error:
        return None, first_problem(error)
    if isinstance(decided, BudgetAmounts) and (others := decided.amounts().keys() - use.limits.keys()):
        return None, f"the budget does not limit {' and '.join(sorted(others))}: add {', '.join(use.limits)}, or deny"
    return decided, ""


async def begin(
    run: Run,
    defined: TaskBudgets | None,
    encoder: ArgumentEncoder,
    arguments: Mapping[str, Any],
    draft: Callable[..., Handoff],
    result_ttl: float | None,
) -> None:
    """Let a run charge the budgets of its task: those of its definition, and those that it has from other tasks.

    The callback of a group has no budgets with keys. draft: see `continue_as`. result_ttl: seconds, of the task.

    Raises `InvalidBudgetUse`.
    """
    given: Mapping[str, Any] = {}
    if defined is not None and defined.keyed and run.envelope.group:  # its arguments follow from the results
        defined = replace(defined, budgets=tuple(budget for budget in defined.budgets if budget.by is None))
    if defined is not None and defined.keyed:
        given = from_json(encoder.encode_call((), arguments)[0])
    secrets = {path[0] for path in run.envelope.secrets if path}
    uses = task_budgets(defined, run.id, given, secrets=secrets, inherited=run.envelope.budgets)
    kept = run.envelope.options.result_ttl or result_ttl or run.settings.result_ttl
    store = BudgetStore(run.gateway, Namespace(run.delivery.partition.namespace))
    run.spending = spending = RunSpending(run, uses, store, draft, kept)
    await spending.begin()


# calls of the context


async def spend(run: Run, spent: Spent) -> BudgetLeft:
    """Charge what a call has cost. See `Context.spend`."""
    if (step := CURRENT_STEP.get()) is not None:
        return await step.charge(spent)
    await check_call(run, _SPEND, own=True)
    return BudgetLeft() if run.spending is None else await run.spending.spend(spent, in_step=False)


async def budget_left(run: Run) -> BudgetLeft:
    """Return what is left of the budgets of a task now. See `Context.budget`."""
    check_place(run, "#budget", own=True, within=True)
    return BudgetLeft() if run.spending is None else await run.spending.left_now()
