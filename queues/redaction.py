"""Keeping the secrets among a task's arguments out of what is told about it: errors, tracebacks, logs, steps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final

from .marks import MASK

__all__ = ["Redaction"]

_SHORTEST: Final = 4
"""Characters. What is shorter is found in any text by chance, and hiding it would say where it is."""

_INPUT = re.compile(r"input_value=.*?, input_type=", re.DOTALL)


class Redaction:
    """Replaces secrets in text, as they are and as Python and JSON quote them.

    Errors of pydantic quote what they were given, cut in the middle where it is long: of them, the input is left out.
    """

    __slots__ = ("_pattern",)

    def __init__(self, values: Iterable[str]) -> None:
        forms = {form for value in values if len(value) >= _SHORTEST for form in _forms(value)}
        longest_first = sorted(forms, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if forms else None

    def __call__(self, text: str) -> str:
        if "input_value=" in text:
            text = _INPUT.sub("input_type=", text)
        return text if self._pattern is None else self._pattern.sub(MASK, text)


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
