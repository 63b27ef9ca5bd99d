"""Errors of sessions."""

from __future__ import annotations

from ..errors import QueueError

__all__ = [
    "SessionError",
    "SessionFailed",
    "SessionFull",
    "SessionIdle",
    "SessionNotFound",
    "SessionOfOtherApp",
    "TurnEarly",
    "TurnRefused",
]


class SessionError(QueueError):
    """Base of errors of sessions."""


class SessionNotFound(SessionError, LookupError):
    """There is no such session: no message was sent to it, it was forgotten, or its retention has passed."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no session {name}: no message was sent to it, it was forgotten, or its retention has passed"
        )
        self.name = name


class SessionFailed(SessionError):
    """A turn of the session is a dead letter. turn: its number. task_id: its task. reason: that of the dead letter."""

    def __init__(self, name: str, turn: int, task_id: str, reason: str) -> None:
        super().__init__(
            f"session {name} stopped at turn {turn}, which failed ({reason}): replay it with 'perdure dlq replay "
            f"{task_id}', or pass over it with send(..., skip_failed=True) or 'perdure session send --skip-failed'"
        )
        self.name, self.turn, self.task_id, self.reason = name, turn, task_id, reason


class SessionFull(SessionError):
    """The session has too many messages that wait for their turn. waiting: their number. size: their bytes."""

    def __init__(self, name: str, waiting: int, size: int, *, most: tuple[int, int]) -> None:
        """most: the limits of number and bytes."""
        super().__init__(
            f"session {name} has {waiting:,} waiting messages with {size:,} bytes, and takes at most {most[0]:,} "
            f"messages and {most[1]:,} bytes: wait for their turns"
        )
        self.name, self.waiting, self.size = name, waiting, size


class SessionIdle(SessionError):
    """A confirmation has no turn of the session that waits for it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no turn of session {name} is running or stopped: there is nothing to confirm")
        self.name = name


class SessionOfOtherApp(SessionError):
    """The session belongs to another app, which has an agent of the same name. owner: the app of the session."""

    def __init__(self, name: str, owner: str, app: str) -> None:
        super().__init__(
            f"session {name} belongs to app {owner!r}, not to {app!r}; nothing was stored: give the agent or the "
            "session another name, or one of the apps another PERDURE_NAMESPACE"
        )
        self.name, self.owner, self.app = name, owner, app


class TurnRefused(SessionError):
    """The task of a turn cannot run: the turn has ended or was passed over, or its session was forgotten."""

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(f"task {task_id} was refused: {problem}; nothing was run")
        self.task_id = task_id


class TurnEarly(SessionError):
    """The turn is not claimed: Redis has lost the claim after its task was stored. It is claimed again.

    Attributes:
        now: Time in milliseconds of Redis' clock.
    """

    def __init__(self, turn: str, now: int) -> None:
        super().__init__(f"turn {turn} is not claimed: Redis has lost the claim, which the turn before it makes again")
        self.now = now
