"""Operator pause: the stages that park a task which a pause of an operator holds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from pydantic_core import from_json

from ....queues.argument_conditions import all_match
from ....queues.pauses import PauseRule
from ....queues.task_filter import is_secret
from ....queues.transport.large_values import REFERENCE
from ..outcome import Outcome, Paused
from .execution import GROUP, Execution, Stage, check_limits
from .task_lookup import FindTask


class HeldByName:
    """Stage: park a task that is paused whatever its arguments, which need not be readable."""

    def __init__(self, rules: Sequence[PauseRule]) -> None:
        self._rules = [rule for rule in rules if not rule.where]

    def __call__(self, execution: Execution) -> Outcome | None:
        for rule in _named(self._rules, execution):
            return _parked(rule, execution)
        return None


class HeldByArguments:
    """Stage: park a task that is paused because of its arguments. Secrets among them fulfil no condition."""

    def __init__(self, rules: Sequence[PauseRule]) -> None:
        self._rules = [rule for rule in rules if rule.where]

    def __call__(self, execution: Execution) -> Outcome | Coroutine[Any, Any, Outcome | None] | None:
        rules = _named(self._rules, execution)
        if not rules or GROUP in execution.arguments:  # the arguments of a callback follow from results
            return None
        if execution.run.delivery.fields.get(b"args", b"")[:1] == REFERENCE:
            return self._compare_large(rules, execution)
        return _compared(rules, execution)

    async def _compare_large(self, rules: Sequence[PauseRule], execution: Execution) -> Outcome | None:
        """Compare large arguments, which are made JSON data in a thread: the event loop has other tasks."""
        return await asyncio.to_thread(_compared, rules, execution)


def with_pauses(stages: Sequence[Stage], by_name: HeldByName, by_arguments: HeldByArguments) -> tuple[Stage, ...]:
    """Return the stages of a delivery with these: before the task is looked up, and before its limits are taken."""
    found: list[Stage] = []
    for stage in stages:
        if isinstance(stage, FindTask):
            found.append(by_name)
        elif stage is check_limits:
            found.append(by_arguments)
        found.append(stage)
    return tuple(found)


def _named(rules: Sequence[PauseRule], execution: Execution) -> Sequence[PauseRule]:
    """Return the rules that may hold a task. One that is to be cancelled is held by none."""
    run = execution.run
    if run.history.cancel:
        return ()
    return [rule for rule in rules if rule.names(run.delivery.partition.queue, run.envelope.task)]


def _compared(rules: Sequence[PauseRule], execution: Execution) -> Outcome | None:
    """Compare the arguments, as JSON data, with the conditions of rules."""
    data, marked = execution.task.arguments.encode_call((), execution.arguments)
    arguments, secrets = from_json(data), (*marked, *execution.run.envelope.secrets)
    for rule in rules:
        if all_match(rule.where, arguments) and not any(is_secret(condition, secrets) for condition in rule.where):
            return _parked(rule, execution)
    return None


def _parked(rule: PauseRule, execution: Execution) -> Outcome:
    return Paused(rule.number, rule.target, execution.run.history.counters)
