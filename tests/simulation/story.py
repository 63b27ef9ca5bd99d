"""The story of a run, in the order in which things happened."""

from __future__ import annotations

from collections.abc import Iterator

from .world import Outcome, World

__all__ = ["narrate"]

_PHRASES = {
    "acked": "{task} is stored",
    "sent": "{value!r} is stored",
    "answered": "the answer of {task} is {value}",
    "asked": "{task} is stored already",
    "run": "{machine} runs {task} (run {run})",
    "effect": "{machine} executes {step} of {task}: {value}",
    "got": "{machine} has recorded {value} for {task}",
    "failed": "{machine} leaves {task} with {value}",
    "sleeps": "{task} sleeps for {value} s ({step})",
    "wakes": "{task} wakes ({step})",
    "answers": "{value!r} is sent to {task} by {step}",
    "stored": "{value!r} is stored",
    "unsure": "{value!r} may be stored",
    "refused": "{value!r} is refused",
    "used": "{machine} has {value!r} for {step} of {task}",
    "child": "{machine} runs {task}, the child {step}",
    "joined": "{machine} has {value} of the child {step} for {task}",
    "says": "{machine} emits item {value} of the body of {task} ({step!r})",
    "notes": "{machine} emits {value!r} of {task}, with a key",
    "emitted": "{machine} has emitted what {step} of {task} does: {value}",
    "heard": "{machine} has {value} of {step} for {task}",
    "sets": "{machine} sets {value!r}",
    "reads": "{machine} has read {value!r} for {step} of {task}",
    "updated": "{value!r} is stored",
    "holds": "{machine} runs {task} in {step} {value}",
    "frees": "{machine} leaves {step} {value} with {task}",
    "rests": "{task} rests in {step} {value}",
    "stirs": "{task} wakes in {step} {value}",
    "dies": "{machine} is ended by {task}",
    "fresh": "{task} is replayed without its checkpoint",
    "result": "{machine} returns {value} from {task}",
}


def narrate(world: World, outcome: Outcome) -> Iterator[str]:
    """Yield the plan, then one line per event, then the violations."""
    plan = outcome.plan
    variant = f", variant {plan.variant}" if plan.variant else ""
    yield f"seed {plan.seed}{variant}: {plan.workers} workers, lease {plan.lease:g} s, {len(plan.tasks)} tasks"
    if plan.supervisors is not None:
        yield f"  each worker is a supervisor: {plan.supervisors}"
    if plan.stored_lease:
        yield f"  a lease of {plan.stored_lease:g} s is stored"
    for number, one in enumerate(plan.settings):
        yield f"  workers {number}, {number + len(plan.settings)}, ...: {one}"
    if plan.again:
        yield f"  a second caller enqueues every second task, and asks for all of them each {plan.again:g} s"
    for task in plan.tasks:
        key = f", key {task.key!r}" if task.key else ""
        yield f"  {task.id}: {task.kind}, {task.steps} steps of {task.pause:g} s{key}, enqueued at {task.at:.2f} s"
    for session in plan.sessions:
        yield f"  {session.id}: {session.messages} messages, {session.gap:g} s apart, from {session.at:.2f} s on"
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
