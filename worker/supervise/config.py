"""What a supervisor is asked to do, and what it learns from its first child that has imported the app."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...queues import Address, Namespace
from ..runtime.supervisor_link import Role
from ..runtime.webhooks import WebhookTarget

__all__ = ["AppInfo", "SupervisorConfig"]


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """The supervisor's task.

    commands: how a child of each role is started. processes: ordinary children. isolated: children, at most, that run
    suspects at one time. name: begins the supervisor's name, else the app's. burst: ordinary children end by
    themselves when the queues are empty. alert: a command line that is run when the supervisor pauses.
    """

    commands: Mapping[Role, Sequence[str]]
    processes: int
    isolated: int
    name: str | None = None
    burst: bool = False
    alert: str | None = None


@dataclass(frozen=True, slots=True)
class AppInfo:
    """The settings of the app, which a child tells the supervisor, who does not import it. Times are seconds.

    restart_delays: before a child is started again after the first crash within the window, the second and so on.
    webhook: where a pause is told of, besides the alert command.
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
    def read(cls, told: Mapping[str, Any]) -> Self:
        """From what a child has told. `KeyError`, `TypeError` or `ValueError` where it is of another version."""
        directory = told["directory"]
        return cls(
            app=told["app"],
            address=Address(told["url"], None if directory is None else Path(directory)),
            namespace=Namespace(told["namespace"]),
            grace=float(told["grace"]),
            stall_limit=float(told["stall_limit"]),
            crash_threshold=int(told["crash_threshold"]),
            crash_window=float(told["crash_window"]),
            restart_delays=tuple(map(float, told["restart_delays"])),
            webhook=_webhook(told),
        )

    def delay(self, number: int) -> float:
        """Seconds before what has failed `number` times is tried again."""
        return self.restart_delays[min(number, len(self.restart_delays)) - 1] if number > 0 else 0.0


def _webhook(told: Mapping[str, Any]) -> WebhookTarget | None:
    url = str(told.get("webhook", ""))
    if not url:
        return None
    return WebhookTarget(url, str(told.get("webhook_secret", "")).encode(), float(told.get("webhook_timeout", 5.0)))
