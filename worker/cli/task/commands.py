"""`perdure task`: the table of its commands. It imports nothing but typer, as the root of the command line does."""

from __future__ import annotations

from typing import Any

import typer

from ..lazy import LazyCommand, LazyGroup


class _Commands(LazyGroup):
    """The commands of the table."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, (target, help_text) in _COMMANDS.items():
            self.add_command(LazyCommand(name, target, help_text))


_COMMANDS = {
    "list": (".task.listing:list_", "List tasks, the newest first."),
    "show": (".task.show:show", "Show a task: its state, arguments, result, error and artifacts."),
    "why": (".task.show:why", "Explain why a task is in its state, and what happens next."),
    "result": (".task.outcome:result", "Wait for a task, and print its result as JSON."),
    "watch": (".task.outcome:watch", "Print the events of a task as they happen, until it ends."),
    "cancel": (".task.outcome:cancel", "Cancel a task, or all that match, and print the ids."),
    "send": (".task.inbox:send", "Send a message to a task, and print the id of the task that received it."),
    "inbox": (".task.inbox:inbox", "Print the messages that a task has not read yet, the oldest first."),
    "answer": (
        ".task.answers:answer",
        "Answer a question of a task, and print the id of the task that has the answer.",
    ),
    "waiting": (".task.answers:waiting", "List the questions that tasks wait for: open waits for answers."),
    "values": (".task.values:values", "Print the named values of a task, in the order of their last changes."),
    "update": (".task.values:update", "Set a named value of a task, and print the id of the task that has it."),
    "artifact": (".artifacts:artifact", "List the artifacts of a task, or fetch one of them."),
    "events": (".task.events:events", "Print the events of a task, or of the tasks of a queue."),
    "state": (".task.history:state", "Show the state of a task after one of its events."),
    "fork": (".task.history:fork", "Start a new task from an event of another task."),
    "dismiss": (".task.correct:dismiss", "Dismiss a finding of a coherence check, and print the task's id."),
    "handoff": (".task.history:handoff", "Print the handoff document of a task."),
    "export": (".task.transfer:export", "Write a task that does not run to a file, and cancel it here."),
    "import": (".task.transfer:import_", "Store a task that another deployment exported, and print its id."),
    "compact": (".task.correct:compact", "Move closed steps and old messages out of the state of an agent."),
    "correct": (".task.correct:correct", "Correct the state of an agent, and print the task's id."),
    "resolve": (".task.correct:resolve", "Decide about a risky step in doubt, and print the task's id."),
    "versions": (".task.history:versions", "List the versions of code that tasks began with."),
    "catalog": (".queue:catalog", "List the tasks that workers have published."),
}

app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False)


@app.callback()
def task() -> None:
    """List, show, watch and cancel tasks, send them messages, and read or fork their history."""
