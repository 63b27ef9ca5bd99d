"""What the server spent on something: its CPU time, commands and bytes, by its own account (INFO)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .place import Place
from .raw import RawClient

__all__ = ["Meter", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """seconds: that passed. cpu: seconds of the server's processor, user and system. received, sent: bytes from and to
    clients. calls: by command, those that scripts carry out included. micros: by command, microseconds, a script's
    commands included in it. clients: connections, at its end.
    """

    seconds: float
    cpu: float
    received: float
    sent: float
    calls: Mapping[str, float]
    micros: Mapping[str, float]
    clients: int

    @property
    def load(self) -> float:
        """Part of one processor core that the server used: 1 is its limit, as it carries out commands in one thread."""
        return self.cpu / self.seconds

    def beyond(self, idle: Usage) -> Usage:
        """What was spent beyond what goes on without any work, as it was seen while there was none."""
        share = self.seconds / idle.seconds
        return replace(
            self,
            cpu=self.cpu - idle.cpu * share,
            received=self.received - idle.received * share,
            sent=self.sent - idle.sent * share,
            calls=_minus(self.calls, idle.calls, share),
            micros=_minus(self.micros, idle.micros, share),
        )

    def per_second(self, command: str) -> float:
        return self.calls.get(command, 0) / self.seconds


def _minus(one: Mapping[str, float], other: Mapping[str, float], share: float = 1.0) -> dict[str, float]:
    return {name: value - other.get(name, 0) * share for name, value in one.items()}


class Meter:
    """Reads the server's account now and later; the difference is what was spent in between."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._began = self._read()

    def read(self) -> Usage:
        """What was spent since the meter was made."""
        now, began = self._read(), self._began
        return Usage(
            seconds=now.seconds - began.seconds,
            cpu=now.cpu - began.cpu,
            received=now.received - began.received,
            sent=now.sent - began.sent,
            calls=_minus(now.calls, began.calls),
            micros=_minus(now.micros, began.micros),
            clients=now.clients,
        )

    def _read(self) -> Usage:
        with RawClient(self._place.url) as client:
            sections = client.pipeline(
                [("INFO", "cpu"), ("INFO", "stats"), ("INFO", "commandstats"), ("INFO", "clients")]
            )
        told = dict(line.split(":", 1) for line in b"\n".join(sections).decode().splitlines() if ":" in line)
        calls: dict[str, float] = {}
        micros: dict[str, float] = {}
        for name, values in told.items():
            if name.startswith("cmdstat_"):
                found = dict(one.split("=") for one in values.split(","))
                calls[name.removeprefix("cmdstat_")] = int(found["calls"])
                micros[name.removeprefix("cmdstat_")] = int(found["usec"])
        return Usage(
            seconds=time.monotonic(),
            cpu=float(told["used_cpu_user"]) + float(told["used_cpu_sys"]),
            received=int(told["total_net_input_bytes"]),
            sent=int(told["total_net_output_bytes"]),
            calls=calls,
            micros=micros,
            clients=int(told["connected_clients"]),
        )
