"""Changes of limits by operators, as commands and pages make them: checked, and with the tasks they make room for.

`limits/control.py` stores a change; here is what comes before and after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .admission import Admission
from .defaults import nearest
from .errors import LimitNotFound
from .keys import Namespace
from .limit_views import LimitDetails, show_limit, waiting_for
from .limits.control import SETTINGS, LimitControl, check_settings, read_setting
from .limits.store import TOKEN_LIFE, LimitStore, LimitView, Released
from .transport.gateway import Gateway

SHOWN: Final = 20
"""Holders and waiting keys of a limit that is returned after a change."""

_WOKEN: Final = 100
"""Waiting keys that are looked at after a change, which may have made room for them."""


class InvalidSetting(ValueError):
    """A setting of a limit is not valid.

    Attributes:
        setting: Its name; empty if the settings contradict each other.
        problem: The end of a sentence that starts with the name, or a sentence.
        hint: A question for the end, such as one about a similar name; may be empty.
    """

    def __init__(self, setting: str, problem: str, hint: str = "") -> None:
        super().__init__(f"{setting} {problem}{hint}".lstrip())
        self.setting = setting
        self.problem = problem
        self.hint = hint


def read_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Return the stored fields of settings. Raises `InvalidSetting`."""
    found: dict[str, dict[str, str]] = {}
    for setting, value in given.items():
        try:
            found[setting] = read_setting(setting, value)
        except ValueError as error:
            hint = "" if setting in SETTINGS else nearest(setting, SETTINGS)
            raise InvalidSetting(setting, str(error), hint) from None
    # The burst of its own wins over the one that a rate brings, in whatever order they are given.
    ordered = sorted(found.items(), key=lambda item: item[0] == "burst")
    return {field: value for _, part in ordered for field, value in part.items()}


class LimitChanges:
    """Changes of one limit by an operator. Each returns the limit as it is afterwards.

    Each raises `LimitNotFound` if no worker has published the limit.

    Args:
        by: Who makes them; kept with each change.
    """

    def __init__(self, gateway: Gateway, namespace: Namespace, name: str, *, by: str) -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._name = name
        self._control = LimitControl(gateway, namespace, name, by=by)

    async def set(
        self, settings: Mapping[str, str], why: str = "", *, what: str = "", revision: int | None = None
    ) -> LimitDetails:
        """Replace numbers of the code; an empty value returns to the one of the code, `none` is no such number.

        Args:
            what: The change for people. Default: the settings.
            revision: `LimitStatus.revision` as the caller has read it; None for whatever it is now.

        Raises:
            InvalidSetting: A setting is unknown or not valid, or they contradict each other.
            ChangedMeanwhile: The revision is another one.
        """
        view = await self._published()
        fields = self._checked(view, view.overrides, read_settings(settings))
        shown = " ".join(f"{name}={value}" for name, value in settings.items())
        await self._control.set(fields, what or f"set {shown}", why, revision=revision)
        return await self._after()

    async def reset(self, why: str = "", *, revision: int | None = None) -> LimitDetails:
        """Return to the definition in the code. Raises `ChangedMeanwhile` as `set` does."""
        view = await self._published()
        fields = self._checked(view, {}, {field: "" for names in SETTINGS.values() for field in names})
        await self._control.set(fields, "reset to the code", why, revision=revision)
        return await self._after()

    async def hold(self, seconds: float, why: str = "") -> LimitDetails:
        """Let nothing start for some seconds. A later end of an earlier hold stays."""
        await self._published()
        await self._control.hold(seconds, why)
        return await self._after()

    async def release(self, why: str = "") -> LimitDetails:
        """End every hold, and close the breaker."""
        await self._published()
        await self._control.release(why)
        return await self._after()

    async def release_task(self, task_id: str, why: str = "") -> LimitDetails | None:
        """Take the limit from a task; return None if the task does not hold it."""
        await self._published()
        released = await self._control.release_task(task_id, why)
        if released is None:
            return None
        await self._admit(released)
        return await self._after()

    def _checked(self, view: LimitView, overrides: Mapping[str, str], fields: Mapping[str, str]) -> dict[str, str]:
        try:
            return check_settings(self._name, view.defined, overrides, fields)
        except ValueError as error:
            raise InvalidSetting("", str(error)) from None

    async def _published(self) -> LimitView:
        (view,) = await LimitStore(self._gateway, self._namespace).read([self._name], most=1)
        if "digest" not in view.defined:
            raise await limit_not_found(self._gateway, self._namespace, self._name)
        return view

    async def _after(self) -> LimitDetails:
        """Admit the tasks for which a change has made room, and return the limit."""
        place = (self._gateway, self._namespace)
        waiting = (await waiting_for(*place, [self._name], most=_WOKEN))[self._name]
        await self._admit(Released([key.hint for key in waiting.keys], [], []))
        details = await show_limit(*place, self._name, most=SHOWN)
        if details is None:
            raise await limit_not_found(*place, self._name)
        return details

    async def _admit(self, released: Released) -> None:
        await Admission(self._gateway, self._namespace, life=TOKEN_LIFE).start_waiting(released)


async def limit_not_found(gateway: Gateway, namespace: Namespace, name: str) -> LimitNotFound:
    """Return the error of a limit that no worker has published, with the nearest name."""
    names = await LimitStore(gateway, namespace).names()
    hint = nearest(name, names) or (f"; published are: {', '.join(names)}" if names else "; start a worker of its app")
    return LimitNotFound(f"no worker has published a limit {name!r} in namespace {namespace.name!r}{hint}")
