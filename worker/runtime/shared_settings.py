"""Settings that all workers of a namespace share: the stored values, else this worker's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...queues.errors import ConfigurationError
from ...queues.keys import check_name
from ...queues.shared_config import SHARED, SharedConfig, SharedName
from ..app import App
from ..errors import SettingsDiffer
from ..log import logger
from ..settings import Settings


class SharedSettings:
    """Values in force; `apply` follows the stored ones. A worker without stored values uses its own settings.

    Attributes:
        result_ttl, dead_letter_ttl: in seconds.
    """

    def __init__(self, own: Settings) -> None:
        self._own = own
        self._ignored: Mapping[SharedName, bytes] = {}
        self._stored: Mapping[SharedName, float] = {}
        self._leases = (own.lease, own.lease)
        self.result_ttl = own.result_ttl
        self.dead_letter_ttl = own.dead_letter_ttl

    def check(self, config: SharedConfig) -> None:
        """Raise `SettingsDiffer` if the worker is strict and has set one of the stored values otherwise."""
        if self._own.strict:
            for name in self._differing(config):
                stored, own = config.stored[name], getattr(self._own, name)
                raise SettingsDiffer(
                    f"{name} must be the stored {stored:.15g} s, got {own:.15g} s: unset PERDURE_{name.upper()} or the "
                    f"argument, or change it for all workers with 'perdure config set {name}'"
                )

    def apply(self, config: SharedConfig) -> bool:
        """Use the stored values from now on. Return whether the lease changed."""
        changed = {name for name in SHARED if config.stored.get(name) != self._stored.get(name)}
        for name in self._differing(config):
            if name in changed:
                stored, own = config.stored[name], getattr(self._own, name)
                logger.warning("{} {:.15g} s is stored: used in place of this worker's {:.15g} s", name, stored, own)
        for name, value in config.ignored.items():
            if self._ignored.get(name) != value:
                text = value[:80].decode("utf-8", "backslashreplace")
                logger.warning(
                    "the stored {} is ignored: it must be a time, got {!r}; store one with 'perdure config set {}'",
                    name,
                    text,
                    name,
                )
        self._ignored = config.ignored
        self._stored = config.stored
        self.result_ttl = config.stored.get("result_ttl", self._own.result_ttl)
        self.dead_letter_ttl = config.stored.get("dead_letter_ttl", self._own.dead_letter_ttl)
        before, self._leases = self._leases, config.leases(self._own.lease)
        return before != self._leases

    @property
    def renewal_lease(self) -> float:
        """Seconds; this worker renews its deliveries each third of it."""
        return self._leases[0]

    @property
    def claim_lease(self) -> float:
        """Seconds after which this worker claims deliveries of others; more only while the lease is being changed."""
        return self._leases[1]

    def _differing(self, config: SharedConfig) -> list[SharedName]:
        """Return the names of stored settings that this worker's environment or arguments set otherwise."""
        given = self._own.model_fields_set
        return [name for name in config.stored if name in given and getattr(self._own, name) != config.stored[name]]


@dataclass(frozen=True)
class WorkerTimings:
    """Intervals and time limits of a worker, in seconds.

    Args:
        release_limit: that cancelled runs have to release their tasks.
        handler_poll: between two checks whether cancelled handlers have ended.
        last_reply: for the replies of Redis while the worker stops.
        sweep_interval: between two sweeps for pending messages, at most: the tasks of a lost host resume within
            lease + 5 s.
        notice_interval: between two looks for notices and joins that dead workers have left.
        clean_interval: between two rounds of one janitor.
        clean_lock: between two rounds in the fleet, at least: less than the shortest sleep of one janitor.
    """

    release_limit: float = 5.0
    handler_poll: float = 0.02
    last_reply: float = 1.0
    sweep_interval: float = 3.0
    notice_interval: float = 3.0
    clean_interval: float = 60.0
    clean_lock: float = 25.0


def check_arguments(app: object, concurrency: object, queues: object, name: object) -> None:
    """Raise `ConfigurationError` for an argument of `Worker` that is wrong."""
    if not isinstance(app, App):
        raise ConfigurationError(f"app must be an App, got {app!r}")
    if app.settings.approver_key_file is not None:
        raise ConfigurationError(
            "approver_key_file must not be set for a worker, whose tasks could sign answers with it: set "
            "PERDURE_APPROVER_KEY_FILE for the program that answers only"
        )
    if not isinstance(concurrency, int) or concurrency < 1:
        raise ConfigurationError(f"concurrency must be a whole number, 1 or more, got {concurrency!r}")
    if isinstance(queues, str):
        raise ConfigurationError(f"queues must be a list of names, got {queues!r}: pass [{queues!r}]")
    if queues is not None and not isinstance(queues, Sequence):
        raise ConfigurationError(f"queues must be a list of names, got {queues!r}")
    names = [("queue", queue) for queue in queues or ()]
    if name is not None:
        names.append(("name", name))
    for kind, given in names:
        try:
            check_name(kind, given)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
