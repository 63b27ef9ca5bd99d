"""Configuration of a supervisor, and the settings of the app that its first child reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ...queues.keys import Namespace
from ...queues.transport.address import Address
from ..runtime.children.child import SupervisorTimings, delay_after
from ..runtime.webhook_posting import WebhookTarget
from .source_files import SourceFiles


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """Settings of one supervisor.

    Args:
        command: command line of a child. It gets its role from the supervisor.
        processes: number of ordinary children.
        isolated: greatest number of quarantine children at one time; those whose task has survived do not count.
        name: first part of the supervisor's name; default: the app's name.
        burst: whether ordinary children exit when the queues are empty, and are not replaced then.
        alert: shell command to run when the supervisor pauses.
        timings: intervals and time limits.
        environment: variables of children in addition to those of this process.
        sources: source files that are watched in development, whose changes replace all children; None for none.
    """

    command: Sequence[str]
    processes: int
    isolated: int
    name: str | None = None
    burst: bool = False
    alert: str | None = None
    timings: SupervisorTimings = field(default_factory=SupervisorTimings)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    sources: SourceFiles | None = None


@dataclass(frozen=True, slots=True)
class AppInfo:
    """Settings of the app, reported by a child, because the supervisor does not import the app. Times are seconds.

    Args:
        restart_delays: before the replacement of a crashed child starts: after the first crash within the window, the
            second and so on; the last one repeats. After the first crash, a spare takes over at once.
        webhook: where to post an event when the supervisor pauses.
    """

    app: str
    address: Address
    namespace: Namespace
    grace: float
    stall_limit: float
    crash_threshold: int
    crash_window: float
    restart_delays: tuple[float, ...]
    webhook: WebhookTarget | None = None

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Read the `loaded` message of a child.

        Raises:
            KeyError, TypeError, ValueError: The child runs an incompatible version.
        """
        directory = message["directory"]
        return cls(
            app=message["app"],
            address=Address(message["url"], None if directory is None else Path(directory)),
            namespace=Namespace(message["namespace"]),
            grace=float(message["grace"]),
            stall_limit=float(message["stall_limit"]),
            crash_threshold=int(message["crash_threshold"]),
            crash_window=float(message["crash_window"]),
            restart_delays=tuple(map(float, message["restart_delays"])),
            webhook=_webhook(message),
        )

    def restart_delay(self, failures: int) -> float:
        """Return the delay in seconds before the next start after a number of failures in a row."""
        return delay_after(failures, self.restart_delays)


def _webhook(message: Mapping[str, Any]) -> WebhookTarget | None:
    url = str(message.get("webhook", ""))
    if not url:
        return None
    secret = str(message.get("webhook_secret", "")).encode()
    return WebhookTarget(url, secret, float(message.get("webhook_timeout", 5.0)))
