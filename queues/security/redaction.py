"""Keeping the secrets among a task's arguments out of what is told about it: errors, tracebacks, logs, steps."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Final

from .secret_arguments import MASK

__all__ = ["Redaction"]

_SHORTEST: Final = 4
"""Characters. What is shorter is found in any text by chance, and hiding it would say where it is."""

_MOST: Final = 200
_LONGEST: Final = 256 * 1024
"""Secrets that are looked for, and characters that they have together."""

_INPUT = re.compile(r"input_value=.*?, input_type=", re.DOTALL)


class Redaction:
    """Replaces secrets in text, as they are and as Python and JSON quote them.

    Errors of pydantic quote what they were given, cut in the middle where it is long: of them, the input is left out.
    Where there are too many secrets to look for each of them, nothing of the text is left.
    """

    __slots__ = ("_forms",)

    def __init__(self, values: Collection[str]) -> None:
        self._forms: list[str] | None = None
        if len(values) <= _MOST and sum(map(len, values)) <= _LONGEST:
            forms = {form for value in values if len(value) >= _SHORTEST for form in _forms(value)}
            self._forms = sorted(forms, key=len, reverse=True)

    @property
    def blind(self) -> bool:
        """Whether there are too many secrets to look for, so that nothing is left of any text."""
        return self._forms is None

    def __call__(self, text: str) -> str:
        if self._forms is None:
            return MASK
        if "input_value=" in text:
            text = _INPUT.sub("input_type=", text)
        for form in self._forms:
            if form in text:
                text = text.replace(form, MASK)
        return text


def _forms(value: str) -> Iterable[str]:
    yield value
    yield repr(value)[1:-1]
    yield ascii(value)[1:-1]
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield repr(value.encode("utf-8", "surrogatepass"))[2:-1]
    for line in value.splitlines():  # a traceback indents lines
        if len(line) >= 4 * _SHORTEST:
            yield line
