"""What a dead letter tells about the error that buried it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = ["Evidence"]

_MESSAGE_LIMIT = 4_000
_TRACEBACK_LIMIT = 16_000


@dataclass(frozen=True, slots=True)
class Evidence:
    """An error as text: its type, its message, its traceback (each of bounded length)."""

    error: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, redact: Callable[[str], str] | None = None) -> Evidence:
        """redact: keeps secrets out of message and traceback."""
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return replace(cls.brief(error, redact), traceback=_cut(redact(lines) if redact else lines, _TRACEBACK_LIMIT))

    @classmethod
    def brief(cls, error: BaseException, redact: Callable[[str], str] | None = None) -> Evidence:
        """The same without the traceback."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        try:
            message = str(error)
        except Exception as broken:  # noqa: BLE001 - whatever a foreign __str__ raises, the task must be buried
            message = f"<no message: str() raised {type(broken).__name__}>"
        return cls(name, _cut(redact(message) if redact else message, _MESSAGE_LIMIT))

    def fields(self) -> dict[str, object]:
        return {"error": self.error, "message": self.message, "traceback": self.traceback}


def _cut(text: str, limit: int) -> str:
    """The beginning and the end of a long text: where it started, and what it came to."""
    clean = text.encode("utf-8", "replace").decode("utf-8")
    if len(clean) <= limit:
        return clean
    head = limit // 3
    return f"{clean[:head]}\n... {len(clean) - limit:,} characters left out ...\n{clean[-(limit - head) :]}"
