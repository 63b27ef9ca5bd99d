"""The story of a run, in the order in which things happened."""

from __future__ import annotations

from collections.abc import Iterator

from .world import Outcome, World

__all__ = ["narrate"]

_PHRASES = {
    "acked": "{task} is stored",
    "run": "{machine} runs {task} (run {run})",
    "effect": "{machine} executes {step} of {task}: {value}",
    "got": "{machine} has recorded {value} for {task}",
    "fresh": "{task} is replayed without its checkpoint",
    "result": "{machine} returns {value} from {task}",
}


def narrate(world: World, outcome: Outcome) -> Iterator[str]:
    """Yield the plan, then one line per event, then the violations."""
    plan = outcome.plan
    variant = f", variant {plan.variant}" if plan.variant else ""
    yield f"seed {plan.seed}{variant}: {plan.workers} workers, lease {plan.lease:g} s, {len(plan.tasks)} tasks"
    for task in plan.tasks:
        yield f"  {task.id}: {task.kind}, {task.steps} steps of {task.pause:g} s, enqueued at {task.at:.2f} s"
    begin = world.begin
    lines = [(at, text) for at, text in world.story]
    for entry in world.journal.entries:
        text = _PHRASES[entry.what].format(
            task=entry.task, machine=entry.machine, step=entry.step, value=entry.value, run=entry.run
        )
        lines.append((entry.at - begin, text))
    lines += [(violation.at, f"VIOLATED {violation.kind}: {violation.text}") for violation in outcome.violations]
    for at, text in sorted(lines, key=lambda line: line[0]):
        yield f"{at:9.4f}  {text}"
    yield f"{outcome.commands} commands, {outcome.callbacks} callbacks; digest {outcome.digest}"
