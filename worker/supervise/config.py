"""Configuration of a supervisor, and the settings of the app that its first child reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...queues import Address, Namespace
from ..runtime.webhooks import WebhookTarget

__all__ = ["AppInfo", "SupervisorConfig", "SupervisorTimings", "delay_after"]


@dataclass(frozen=True, slots=True)
class SupervisorTimings:
    """Intervals and time limits of a supervisor, in seconds.

    Args:
        register_interval: between two registrations in Redis; a lifted pause takes effect after at most this time.
        registration_ttl: after which a supervisor that no longer registers counts as gone.
        start_limit: for a child to get ready or to end. Importing an app may be slow.
        stop_margin: that a stopping child has beyond the app's grace, to release its tasks and exit.
        abort_limit: that a stalled child has to write its stacks to the log after SIGABRT.
        final_reports: during a drain, to report crashes to Redis. Later, tasks wait for their lease.
        shortest_run: of a child. One that exits sooner is replaced after this delay, even after exit code 0.
        burst_poll: between two checks whether the quarantined tasks of a burst are done.
        idle_limit: after which a quarantine child without a task is terminated.
        idle_poll: between two checks for idle quarantine children.
        heartbeat_interval: between two heartbeats of a healthy child, and between two checks of the stall monitor.
        heartbeat_limit: without a heartbeat, after which a child is reported as not alive.
        frozen_after: by which a check of the stall monitor is late if the supervisor itself was frozen.
        alert_limit: for the alert command.
    """

    register_interval: float = 1.5
    registration_ttl: float = 15.0
    start_limit: float = 600.0
    stop_margin: float = 10.0
    abort_limit: float = 2.0
    final_reports: float = 5.0
    shortest_run: float = 1.0
    burst_poll: float = 0.2
    idle_limit: float = 60.0
    idle_poll: float = 5.0
    heartbeat_interval: float = 1.0
    heartbeat_limit: float = 5.0
    frozen_after: float = 5.0
    alert_limit: float = 30.0


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
    """

    command: Sequence[str]
    processes: int
    isolated: int
    name: str | None = None
    burst: bool = False
    alert: str | None = None
    timings: SupervisorTimings = SupervisorTimings()


@dataclass(frozen=True, slots=True)
class AppInfo:
    """Settings of the app, reported by a child, because the supervisor does not import the app. Times are seconds.

    Args:
        restart_delays: before the replacement of a crashed child starts: after the first crash within the window, the
            second and so on; the last one repeats.
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


def delay_after(failures: int, delays: Sequence[float]) -> float:
    """Return the delay after a number of failures in a row: the first, second and so on; the last one repeats."""
    return delays[min(failures, len(delays)) - 1] if failures > 0 else 0.0


def _webhook(message: Mapping[str, Any]) -> WebhookTarget | None:
    url = str(message.get("webhook", ""))
    if not url:
        return None
    secret = str(message.get("webhook_secret", "")).encode()
    return WebhookTarget(url, secret, float(message.get("webhook_timeout", 5.0)))
