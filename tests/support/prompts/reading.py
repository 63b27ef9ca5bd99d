"""Reader of a prompt's brief, which knows its form and nothing else, and a check of its claims against the state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson
from perdure import AgentState
from perdure.worker.agents.context.prompt import Prompt
from perdure.worker.agents.context.providers import to_anthropic, to_openai
from perdure.worker.agents.journal.state import StepStatus

HEADINGS = (
    "Left by the former run",
    "Completed steps",
    "Failed and dropped steps",
    "Later steps",
    "Decisions",
    "Discoveries",
    "Promises",
    "Open questions",
    "Artifacts",
    "Changed files",
    "In flight",
    "Memories for this step",
)
"""The sections of a brief, in order."""

_STEP = re.compile(r"(?:Continue with s|S)tep (\d+) of (\d+): `([^`]+)`")
_MISSING = re.compile(r"- (\d+) (?:earlier|more) not shown(?:: (.*))?\.$")
_FOOTER = re.compile(r"- Cut \(\.\.\.\): `recall_step\(KEY\)`\.$")
_SPAN = re.compile(r"`([^`]+)`(?: to `([^`]+)`)?")


@dataclass(slots=True)
class Brief:
    """Claims of a brief: the next step (number, of how many, key), entries by section, and what is missing of them."""

    resuming: bool = False
    closed: bool = False
    step: tuple[int, int, str] | None = None
    sections: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, tuple[int, str]] = field(default_factory=dict)
    elsewhere: str = ""

    def keys(self, heading: str) -> list[str]:
        """Return the keys of the steps that a section lists."""
        return [line.removeprefix("- `").partition("`")[0] for line in self.sections.get(heading, ())]

    def spans(self, heading: str) -> list[tuple[str, str]]:
        """Return the first and the last key of the steps that a section names without listing them."""
        _, which = self.missing.get(heading, (0, ""))
        return [(found[1], found[2] or found[1]) for found in _SPAN.finditer(which.partition(";")[0])]


def brief_of(prompt: Prompt) -> Brief:
    """Return what the brief of a prompt claims. Fails if the prompt has not exactly one, or one of another form."""
    texts = [one.content for one in prompt.messages[prompt.cacheable :] if one.content.startswith("# Brief")]
    assert len(texts) == 1, "one brief, after everything that stays"
    assert not any(one.content.startswith("# Brief") for one in prompt.messages[: prompt.cacheable])
    return read_brief(texts[0])


def read_brief(text: str) -> Brief:
    """Read a brief. Fails if it has another form."""
    brief = Brief()
    text, _, brief.elsewhere = text.partition("\n\nNot shown for lack of space: ")
    head, *sections = re.split(r"\n\n(?=## )", text)
    title, _, headline = head.partition("\n\n")
    assert title == "# Brief"
    assert "\n" not in headline
    brief.resuming = headline.startswith("You are resuming ")
    brief.closed = "ll " in headline and "steps are closed." in headline
    if found := _STEP.search(headline):
        brief.step = (int(found[1]), int(found[2]), found[3])
    for section in sections:
        heading, *lines = section.split("\n")
        name = heading.removeprefix("## ")
        assert name in HEADINGS, name
        assert name not in brief.sections, f"two sections {name!r}"
        assert lines, f"an empty section {name!r}"
        assert all(line.startswith("- ") for line in lines), lines
        for line in lines:
            if found := _MISSING.match(line):
                brief.missing[name] = (int(found[1]), found[2] or "")
        brief.sections[name] = [line for line in lines if not _MISSING.match(line) and not _FOOTER.match(line)]
    assert list(brief.sections) == sorted(brief.sections, key=HEADINGS.index)
    return brief


def contradictions(brief: Brief, state: AgentState) -> list[str]:
    """Return what a brief claims and the state does not, and what of the state it does not account for."""
    found: list[str] = []
    plan = [step.key for step in state.plan]
    done = {step.key for step in state.plan if step.status is StepStatus.DONE}
    still = [step.key for step in state.plan if step.status in (StepStatus.PENDING, StepStatus.RUNNING)]
    if plan and brief.step is None and not brief.closed:
        found.append("it names no step")
    if brief.closed and still:
        found.append("it says that all steps are closed")
    if brief.step is not None:
        number, total, key = brief.step
        gone = state.archive.steps
        if not still or key != (state.current if state.current in still else still[0]):
            found.append(f"its next step is {key}")
        elif (number, total) != (gone + plan.index(key) + 1, gone + len(plan)):
            found.append(f"its step is {number} of {total}")
    shown = brief.keys("Completed steps")
    named = set(shown) | _within(brief.spans("Completed steps"), [key for key in plan if key in done])
    found += [f"{key} is not done" for key in shown if key not in done]
    found += [f"{key} is not accounted for" for key in done - named]
    if len(shown) + brief.missing.get("Completed steps", (0, ""))[0] != len(done) + state.archive.steps:
        found.append("it counts other completed steps")
    later = [key for key in still if brief.step is None or key != brief.step[2]]
    found += [f"{key} is not a later step" for key in brief.keys("Later steps") if key not in later]
    counts = {"Later steps": len(later), "Decisions": len(state.decisions), "Discoveries": len(state.discoveries)}
    counts |= {
        "Artifacts": len(state.artifacts),
        "Changed files": len(state.files),
        "Open questions": len(state.questions) + bool(state.waiting_for),
    }
    counts |= {"Promises": sum(not one.done for one in state.commitments)}
    for heading, number in counts.items():
        missing = brief.missing.get(heading, (0, ""))[0]
        hidden = (
            f"{number} under {heading.split()[-1].lower() if heading != 'Later steps' else 'open'!r}" in brief.elsewhere
        )
        if not hidden and len(brief.sections.get(heading, ())) + missing != number:
            found.append(f"it counts other {heading.lower()}")
    for key in done:
        line = next((line for line in brief.sections.get("Completed steps", ()) if line.startswith(f"- `{key}`")), "")
        result = state.results.get(key)
        if line and isinstance(result, str) and result[:13] not in line:
            found.append(f"it shows another result of {key}")
    return found


def _within(spans: Iterable[tuple[str, str]], keys: Sequence[str]) -> set[str]:
    return {
        key
        for first, last in spans
        if first in keys and last in keys
        for key in keys[keys.index(first) : keys.index(last) + 1]
    }


def parts_of(prompt: Prompt, form: str) -> list[Any]:
    """Return what is sent, in parts: messages, or blocks with their role, without the marks of the cache.

    A provider does not count the marks to the text, nor the ends of the message that a block is in.
    """
    if form == "openai":
        return [*to_openai(prompt)]
    if form == "anthropic":
        request = to_anthropic(prompt)
        blocks = [("system", block) for block in request.get("system", [])]
        blocks += [(turn["role"], block) for turn in request["messages"] for block in turn["content"]]
        return [[role, {k: v for k, v in block.items() if k != "cache_control"}] for role, block in blocks]
    return [one.model_dump(mode="json") for one in prompt.messages]


def bytes_of(prompt: Prompt, form: str) -> bytes:
    """Return a prompt as it is sent, as JSON."""
    return orjson.dumps(parts_of(prompt, form))[:-1]


def unchanged(former: bytes, prompt: bytes) -> float:
    """Return the share of a prompt that is the start of the former one."""
    same = next((at for at, (one, other) in enumerate(zip(former, prompt, strict=False)) if one != other), None)
    return (min(len(former), len(prompt)) if same is None else same) / len(prompt)


def stability(prompts: Sequence[Prompt], form: str = "messages") -> list[float]:
    """Return for each prompt but the first the share that is the start of the one before it."""
    sent: list[Any] = [bytes_of(one, form) for one in prompts]
    return [unchanged(former, prompt) for former, prompt in pairwise(sent)]
