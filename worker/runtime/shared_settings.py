"""Settings that all workers of a namespace share: the stored values, else this worker's own."""

from __future__ import annotations

from collections.abc import Mapping

from ...queues.shared_config import SHARED, SharedConfig, SharedName
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
