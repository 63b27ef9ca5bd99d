"""The previous run: why it stopped, how long ago, what is restored of it, and the texts about it for models and people.

What the previous run left is gathered once, before the handler starts, and every reader has it from here: the handler
(`ctx.resumption`), its prompts, the event `resumed` with the text for the user, and the webhook.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from ....queues.wording import counted, shown_time, span
from .handoff.budget import HANDOFF_TOKENS, Counter, clipped, estimated_tokens, fitted_text
from .handoff.document import Handoff, OpenStep
from .quoting import quoted_line

After = Literal["crash", "hand_off", "failure", "wait", "replay", "fork"]

PHRASES: Final[Mapping[After, str]] = {
    "crash": "a crash",
    "hand_off": "a shutdown of its worker",
    "failure": "a failure",
    "wait": "a wait",
    "replay": "a replay",
    "fork": "a fork of another task",
}
"""Phrase for each reason, after which a run resumes. Logs and prompts have no other words for it."""

_HAPPENED: Final[Mapping[After, str]] = {
    "crash": "This work was interrupted by a crash{at}, and has resumed{gap}.",
    "hand_off": "This work was interrupted by a shutdown{at}, and has resumed{gap}.",
    "failure": "An attempt at this work failed{at}, and it is tried again{gap}.",
    "wait": "This work was waiting{since}, and has resumed.",
    "replay": "This work failed{at}, and was started again{gap}.",
    "fork": "This work is a copy of earlier work, and continues it.",
}
"""Sentence for the user on each reason: without names of workers, tasks and steps."""

_CUT_OFF: Final[Mapping[After, str]] = {
    "crash": ", which was cut off",
    "hand_off": ", which was cut off",
    "failure": ", which failed",
    "replay": ", which failed",
}
"""Ending of the sentence on the next step, if it had started."""

_INVITATION: Final = "If anything here is wrong or has changed, please reply with a correction."


class Resumption(BaseModel):
    """Reason for the stop of the previous run, and what this one continues from.

    Attributes:
        at: Time of the stop in milliseconds, by the Redis clock: that of the last sign of the previous run.
        gap: Seconds without a worker, by the Redis clock: from the last sign of the previous run to the reading of its
            checkpoint; None if nothing is known of the previous run.
        restored: Number of restored records by kind (steps, events, decisions, discoveries, messages, progress). Of
            an agent, the steps of its plan that are done and the messages in its state; `nested steps` are the
            recorded steps within the running one. For a function whose checkpoint has more than 512 fields, the kind
            `records` replaces all but events: it is their number.
        task, goal: Name of the task; its goal, of a function its call.
        handoff: Handoff document of the previous run, or one drafted from the event log if it left none.
        received: Handoff document of the task that this one continues, however long ago it was received.
        asked_after: Reason of the stop after which an agent asked whether to continue, if this run follows that wait.
        lost: Numbers of the first and the last event of an agent that its log has lost.
        noted: Note with which an agent's answer begins (`acknowledge_resume`): a model need not say it. Else empty.
    """

    model_config = ConfigDict(frozen=True)

    after: After
    at: int | None = None
    gap: float | None = None
    restored: dict[str, int] = {}
    task: str = ""
    goal: str = ""
    handoff: Handoff | None = None
    received: Handoff | None = None
    asked_after: After | None = None
    lost: tuple[int, int] | None = None
    noted: str = ""

    @property
    def interrupted(self) -> bool:
        """Whether the previous run was interrupted or continues here, which a user should see."""
        return self.after in ("crash", "hand_off", "replay", "fork")

    @property
    def continues(self) -> bool:
        """Whether this is the first run of a successor: another task was continued as this one."""
        return self.after == "hand_off" and self.handoff is not None and self.handoff.why == "hand_off"

    @property
    def reason(self) -> str:
        """Phrase for the reason of the stop: "a crash"."""
        if self.asked_after is not None:
            return f"{PHRASES[self.asked_after]} and a wait for confirmation"
        return "a handoff from another task" if self.continues else PHRASES[self.after]

    @property
    def dated_reason(self) -> str:
        """The reason with the time of the stop, which of a replay is that of the dead letter."""
        if self.at is None:
            return self.reason
        return f"{self.reason} {'of its dead letter of' if self.after == 'replay' else 'at'} {shown_time(self.at)}"

    def summary(self, *, private: bool = False) -> str:
        """Return the summary as one line, for operators. private: Leave out texts of the task (its calls in flight)."""
        found = ", ".join(
            counted(count, _SINGULAR.get(kind) or kind.removesuffix("s"), kind)
            for kind, count in self.restored.items()
            if count
        )
        gap = "" if self.gap is None else f" ({self.gap:.1f} s without a worker)"
        last = (
            "" if self.handoff is None or not self.handoff.last_completed else quoted_line(self.handoff.last_completed)
        )
        calls = () if self.handoff is None or private else self.handoff.dependencies.in_flight
        noted = ", ".join(quoted_line(one.call) for one in calls[:_MAX_CALLS])
        done, in_flight = "" if not last else f"; last step: {quoted_line(last)}", noted and f"; in flight: {noted}"
        return f"resumed after {self.dated_reason}{gap}; restored: {found or 'nothing'}{done}{in_flight}"

    def text(self, budget: int = HANDOFF_TOKENS, *, count: Counter = estimated_tokens) -> str:
        """Return the text for a model: what it resumes, what is done, and what comes next, in a budget of tokens."""
        text = self.opening()
        text += f"\n\nGoal: {quoted_line(self.goal, _MAX_GOAL_OF_PROMPT)}" if self.goal else ""
        if self.handoff is None:
            text += "\n\nNothing was completed before."
        else:
            left = max(0, budget - count(f"{text}\n\n"))
            text += f"\n\n{fitted_text(self.handoff, left, count=count, form=Handoff.to_prompt)}"
        return clipped(text, budget, count)

    def opening(self) -> str:
        """Return the sentence with which a prompt begins to speak of the previous run."""
        at = "" if self.at is None else f" ({shown_time(self.at)})"
        return f"You are resuming {quoted_line(self.task, _MAX_NAME)} after {self.reason}{at}."

    def without(self, answered: Collection[str]) -> Resumption:
        """Return the same without the calls and doubts about steps that have an answer by now."""
        left = self.handoff
        if left is None or not answered:
            return self
        dependencies = left.dependencies.without(answered)
        return self.model_copy(update={"handoff": left.model_copy(update={"dependencies": dependencies})})

    def notice(self, *, private: bool = False) -> str:
        """Return the text for the user in plain words, without names of steps, tools and tasks.

        private: Leave out texts of the task (its goal, the titles of its steps).
        """
        at = "" if self.at is None else f" at {shown_time(self.at)}"
        since = "" if self.at is None else f" since {shown_time(self.at)}"
        gap = "" if self.gap is None else f" {span(round(self.gap * 1000))} later"
        happened = _HAPPENED[self.after].format(at=at, since=since, gap=gap)
        left = self.handoff
        if self.continues:
            happened = f"This work was handed over{at}, and continues here."
        parts = [happened]
        if left is not None and left.agent and self.goal and not (private or self.continues):
            parts.append(f"Goal: {_sentence(self.goal)}")
        if not self.continues:
            parts.append(f"Restored: {self._restored()}.")
        if self.lost is not None:
            parts.append("Some of the latest work was lost and is done again.")
        if left is not None:
            parts += _doubts(left, private=private)
        if left is not None and not self.continues:
            parts += _following(left, _CUT_OFF.get(self.after, ""), private=private)
        return " ".join([*parts, _INVITATION])

    def _restored(self) -> str:
        """Return what is restored, as a user counts it."""
        left, found = self.handoff, list[str]()
        if left is not None and left.total:
            found.append(f"{left.steps} of {counted(left.total, 'step')}")
        elif steps := self.restored.get("steps", 0) if left is None else left.steps:
            found.append(counted(steps, "completed step"))
        for kind in ("decisions", "discoveries", "messages"):
            if number := self.restored.get(kind, 0):
                found.append(counted(number, _SINGULAR.get(kind) or kind.removesuffix("s"), kind))
        return ", ".join(found) or "nothing, no step was completed"


_MAX_NAME: Final = 200
_MAX_CALLS: Final = 3
"""Calls in flight that the summary names."""

_MAX_GOAL_OF_PROMPT: Final = 2000
"""Characters of a goal in a prompt."""

_MAX_GOAL: Final = 300
"""Characters of a goal or title in a notice."""

_SINGULAR: Final = {"discoveries": "discovery", "progress": "progress"}
"""Nouns of kinds of records that are no plural in -s."""


def _title(step: OpenStep) -> str:
    """Return the title of a step of a plan, empty if it has only a key."""
    return quoted_line(step.title, _MAX_GOAL) if step.title and step.title != step.key else ""


def _sentence(text: str) -> str:
    shown = quoted_line(text, _MAX_GOAL)
    return shown if shown.endswith((".", "!", "?")) else f"{shown}."


def _doubts(left: Handoff, *, private: bool) -> list[str]:
    """Return a sentence on what may have taken effect, if anything may."""
    titles = {step.key: _title(step) for step in left.in_progress}
    doubtful = left.dependencies.in_doubt
    named = [title for doubt in doubtful if (title := titles.get(doubt.key, ""))]
    if not doubtful:
        return []
    if private or len(named) < len(doubtful):
        what = counted(len(doubtful), "action that was under way", "actions that were under way")
        return [f"It is not certain whether {what} took effect."]
    return [f"It is not certain whether this took effect: {'; '.join(named)}."]


def _following(left: Handoff, cut_off: str, *, private: bool) -> list[str]:
    """Return a sentence on the next step of the plan; none without a plan.

    cut_off: Its ending if the step had started.
    """
    if (step := left.next_step) is None:
        return ["Next: the end of the work."] if left.total and left.steps == left.total else []
    place = f"step {step.number} of {left.total}"
    cut_off = cut_off if step in left.in_progress else ""
    title = "" if private else _title(step)
    return [f"Next: {title} ({place}){cut_off}." if title else f"Next: {place}{cut_off}."]
