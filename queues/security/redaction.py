"""Redaction of a task's secret arguments from text: errors, tracebacks, logs, steps."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterator
from typing import Final
from urllib.parse import quote, quote_plus

from .secret_arguments import MASK

_SHORTEST: Final = 4
"""Characters. A shorter secret occurs in any text by chance, and masking it would disclose it."""

_ENCODED: Final = 8
"""Characters. Of a shorter secret, other cases and encoded forms are not searched for: they occur by chance too."""

_MAX: Final = 200
_MAX_LENGTH: Final = 256 * 1024
"""Number of secrets that are searched for, and of their characters in total."""

_INPUT: Final = "input_value="
_TYPE: Final = ", input_type="

_MARGIN: Final = 512
"""Characters that are scanned beyond a cut, which may have split a secret or an input that pydantic quotes."""

_GROWTH: Final = 3
"""Limit of the growth of text by masking: the mask has ten characters, the shortest secret four."""

_WINDOW: Final = 5
"""Characters of a sample. A form of at least nine characters contains a whole sample wherever it is in a text."""

_MANY: Final = 100
"""Forms from which on a text is sampled first, which takes as long as the search for so many."""


class Redaction:
    """A filter that masks secrets in text, as they are and as Python and JSON quote them.

    Secrets of at least eight characters are also found in other case, and encoded for a URL, as hexadecimal digits and
    in Base64, within a longer encoded text too. Errors of pydantic quote their input, with the middle of a long one cut
    out, so the input is removed as a whole. If there are too many secrets to search for, the whole text is masked.
    """

    __slots__ = ("_exact", "_folded", "_margin")

    def __init__(self, values: Collection[str]) -> None:
        self._exact: _Forms | None = None
        self._folded = _Forms({})
        self._margin = _MARGIN
        if len(values) <= _MAX and sum(map(len, values)) <= _MAX_LENGTH:
            exact: dict[str, tuple[int, int]] = {}
            folded: dict[str, tuple[int, int]] = {}
            for value in values:
                if len(value) >= _ENCODED:
                    folded |= dict.fromkeys(map(_fold, _other_cases(value)), (0, 0))
                    folded |= {_fold(form): beside for form, beside in _encoded(value) if _fold(form) not in folded}
                elif len(value) >= _SHORTEST:
                    exact |= dict.fromkeys(_quoted(value), (0, 0))
            self._exact, self._folded = _Forms(exact), _Forms(folded)
            self._margin = max(_MARGIN, _GROWTH * max(map(len, (*exact, *folded)), default=0))

    @property
    def blind(self) -> bool:
        """Whether there are too many secrets to search for, so that the whole of any text is masked."""
        return self._exact is None

    def __call__(self, text: str) -> str:
        if self._exact is None:
            return MASK
        text = _without_inputs(text)
        found: list[tuple[int, int]] = []
        self._exact.find(text, found)
        if self._folded:
            self._folded.find(_fold(text), found)
        return _masked(text, found) if found else text

    def head(self, text: str, most: int) -> str:
        """Return at most `most` characters from the beginning of the masked text, without a scan of the rest."""
        if self._exact is None or len(text) <= most + self._margin:
            return self(text)[:most]
        return self(text[: most + self._margin])[: -self._margin][:most]

    def tail(self, text: str, most: int) -> str:
        """Return at most `most` characters from the end of the masked text, without a scan of the rest."""
        if self._exact is None or len(text) <= most + self._margin:
            return self(text)[-most:]
        return self(text[-most - self._margin :])[self._margin :][-most:]


class _Forms:
    """Texts to search for, each with the number of characters before and after it that are masked with it.

    The time is linear in the text. Many forms take little more time than a few: samples of the text, one in
    `_WINDOW` characters, name the few forms that may be in it.
    """

    __slots__ = ("_beside", "_sampled", "_short")

    def __init__(self, beside: dict[str, tuple[int, int]]) -> None:
        self._beside = beside
        self._short = list(beside)
        self._sampled: dict[str, list[str]] = {}
        if len(beside) > _MANY:
            self._short = [form for form in beside if len(form) < 2 * _WINDOW - 1]
            for form in beside:
                for start in range(_WINDOW if len(form) >= 2 * _WINDOW - 1 else 0):
                    self._sampled.setdefault(form[start : start + _WINDOW], []).append(form)

    def __bool__(self) -> bool:
        return bool(self._beside)

    def find(self, text: str, found: list[tuple[int, int]]) -> None:
        """Add the beginning and the end of each occurrence to a list."""
        forms: Collection[str] = self._short
        if self._sampled:
            samples = {text[start : start + _WINDOW] for start in range(0, len(text), _WINDOW)}
            forms = {form for sample in samples & self._sampled.keys() for form in self._sampled[sample]}.union(forms)
        for form in forms:
            start = text.find(form)
            while start >= 0:
                before, after = self._beside[form]
                end = start + len(form)
                found.append((max(0, start - before), min(len(text), end + after)))
                start = text.find(form, end)


def _masked(text: str, found: list[tuple[int, int]]) -> str:
    parts: list[str] = []
    done = 0
    for start, end in sorted(found):
        if start >= done:
            parts += [text[done:start], MASK]
        done = max(done, end)
    return "".join(parts) + text[done:]


def _without_inputs(text: str) -> str:
    parts: list[str] = []
    at = 0
    while (start := text.find(_INPUT, at)) >= 0 and (end := text.find(_TYPE, start)) >= 0:
        parts += [text[at:start], "input_type="]
        at = end + len(_TYPE)
    return "".join(parts) + text[at:] if parts else text


def _fold(text: str) -> str:
    """Return the text in lower case, character by character: the one capital that has two is replaced."""
    return text.replace("\u0130", "I").lower().replace("\u03c2", "\u03c3")  # both are the lower case of one letter


def _other_cases(value: str) -> Iterator[str]:
    """Yield the quoted forms of a secret, whose case does not matter, also where it has more characters in another."""
    for case in dict.fromkeys((value, value.upper(), value.casefold())):
        yield from _quoted(case)


def _quoted(value: str) -> Iterator[str]:
    yield value
    yield repr(value)[1:-1]
    yield ascii(value)[1:-1]
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield repr(value.encode("utf-8", "surrogatepass"))[2:-1]
    for line in value.splitlines():  # a traceback indents lines
        if len(line) >= 4 * _SHORTEST:
            yield line


_LEFT_BY_BROWSERS: Final = ("!'()*", "!'()*;,/?:@&=+$#")
"""Characters that encodeURIComponent and encodeURI of JavaScript leave as they are."""

_BASE64: Final[tuple[Callable[[bytes], bytes], ...]] = (base64.b64encode, base64.urlsafe_b64encode)


def _encoded(value: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield encoded forms, each with the number of characters beside it that hold a part of the secret."""
    data = value.encode("utf-8", "surrogatepass")
    for form in (
        quote_plus(data),
        quote(data),
        quote(data, safe=""),
        *(quote(data, left) for left in _LEFT_BY_BROWSERS),
    ):
        yield form, (0, 0)
    yield data.hex(), (0, 0)
    for shift in range(3):  # a character has six bits: the first and the last may be shared with the text around
        first, bits = -(-8 * shift // 6), 8 * (shift + len(data))
        for encode in _BASE64:
            form = encode(bytes(shift) + data).decode()[first : bits // 6]
            yield form, (int(shift > 0), int(bits % 6 > 0))
