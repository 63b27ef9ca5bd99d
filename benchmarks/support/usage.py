"""CPU time, commands and bytes of the server, as INFO reports them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..raw.client import RawClient
from .deployment import Deployment

__all__ = ["Meter", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's usage over some time. seconds: elapsed. cpu: seconds of user and system time. received, sent: bytes
    from and to clients. calls: by command, including calls from scripts. micros: microseconds by command; a script
    includes its commands. clients: connections at the end.
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
        """Used share of a core; 1 is the limit, because Redis executes commands in one thread."""
        return self.cpu / self.seconds

    def beyond(self, idle: Usage) -> Usage:
        """Return the usage minus that of idle workers over the same time."""
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
    """Measures the usage between two readings of INFO."""

    def __init__(self, deployment: Deployment) -> None:
        self._place = deployment
        self._began = self._read()

    def read(self) -> Usage:
        """Return the usage since the meter was created."""
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
        info = dict(line.split(":", 1) for line in b"\n".join(sections).decode().splitlines() if ":" in line)
        calls: dict[str, float] = {}
        micros: dict[str, float] = {}
        for name, values in info.items():
            if name.startswith("cmdstat_"):
                found = dict(one.split("=") for one in values.split(","))
                calls[name.removeprefix("cmdstat_")] = int(found["calls"])
                micros[name.removeprefix("cmdstat_")] = int(found["usec"])
        return Usage(
            seconds=time.monotonic(),
            cpu=float(info["used_cpu_user"]) + float(info["used_cpu_sys"]),
            received=int(info["total_net_input_bytes"]),
            sent=int(info["total_net_output_bytes"]),
            calls=calls,
            micros=micros,
            clients=int(info["connected_clients"]),
        )
