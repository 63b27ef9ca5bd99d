"""Redaction of a task's secret arguments from text: errors, tracebacks, logs, steps."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Final

from .secret_arguments import MASK

__all__ = ["Redaction"]

_SHORTEST: Final = 4
"""Characters. A shorter secret occurs in any text by chance, and masking it would disclose it."""

_MOST: Final = 200
_LONGEST: Final = 256 * 1024
"""Number of secrets that are searched for, and of their characters in total."""

_INPUT: Final = "input_value="
_TYPE: Final = ", input_type="

_MARGIN: Final = 512
"""Characters that are scanned beyond a cut, which may have split a secret or an input that pydantic quotes."""

_GROWTH: Final = 3
"""Limit of the growth of text by masking: the mask has ten characters, the shortest secret four."""


class Redaction:
    """A filter that masks secrets in text, as they are and as Python and JSON quote them.

    Errors of pydantic quote their input, with the middle of a long one cut out, so the input is removed as a whole.
    If there are too many secrets to search for, the whole text is masked.
    """

    __slots__ = ("_forms", "_margin")

    def __init__(self, values: Collection[str]) -> None:
        self._forms: list[str] | None = None
        self._margin = _MARGIN
        if len(values) <= _MOST and sum(map(len, values)) <= _LONGEST:
            forms = {form for value in values if len(value) >= _SHORTEST for form in _forms(value)}
            self._forms = sorted(forms, key=len, reverse=True)
            self._margin = max(_MARGIN, _GROWTH * max(map(len, self._forms), default=0))

    @property
    def blind(self) -> bool:
        """Whether there are too many secrets to search for, so that the whole of any text is masked."""
        return self._forms is None

    def __call__(self, text: str) -> str:
        if self._forms is None:
            return MASK
        text = _without_inputs(text)
        for form in self._forms:
            if form in text:
                text = text.replace(form, MASK)
        return text

    def head(self, text: str, most: int) -> str:
        """Return at most `most` characters from the beginning of the masked text, without a scan of the rest."""
        if self._forms is None or len(text) <= most + self._margin:
            return self(text)[:most]
        return self(text[: most + self._margin])[: -self._margin][:most]

    def tail(self, text: str, most: int) -> str:
        """Return at most `most` characters from the end of the masked text, without a scan of the rest."""
        if self._forms is None or len(text) <= most + self._margin:
            return self(text)[-most:]
        return self(text[-most - self._margin :])[self._margin :][-most:]


def _without_inputs(text: str) -> str:
    parts: list[str] = []
    at = 0
    while (start := text.find(_INPUT, at)) >= 0 and (end := text.find(_TYPE, start)) >= 0:
        parts += [text[at:start], "input_type="]
        at = end + len(_TYPE)
    return "".join(parts) + text[at:] if parts else text


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
