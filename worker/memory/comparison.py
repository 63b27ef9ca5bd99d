"""Relation of two memories with similar vectors: whether the newer contradicts or replaces the older.

Vectors do not separate "does want" from "does not want", nor "limit 10" from "limit 12". The rules know English words,
and the negations of some other languages. They only decide how two memories are shown: neither is changed or removed,
and if no relation is recognised, both are results of their own.
"""

from __future__ import annotations

import re
import unicodedata
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from .text import word_set

__all__ = ["relation"]


class _Kind(StrEnum):
    """Kind of a difference that changes the statement of a text."""

    NEGATION = "negation"
    NUMBER = "number"
    DATE = "date"
    NAME = "name"


_NEGATIONS: Final = word_set(
    "not no never none nothing neither nor without cannot hardly barely rarely seldom nowhere ain't "
    "stop stops stopped fail fails failed refuse refuses refused "
    "nicht kein keine keinen keinem keiner nie niemals ohne ne pas jamais sans nunca non senza"
)

# Pairs of opposite words; each counts as a negation of the other.
_OPPOSITES: Final = (
    ("enable", "disable"), ("enabled", "disabled"), ("allow", "forbid"), ("allow", "deny"), ("allow", "block"),
    ("allows", "forbids"), ("allows", "denies"), ("allows", "blocks"),
    ("allowed", "forbidden"), ("allowed", "denied"), ("allowed", "blocked"), ("accept", "reject"), ("accept", "refuse"),
    ("accepted", "rejected"), ("accepted", "refused"), ("accepts", "rejects"), ("accepts", "refuses"),
    ("all", "some"), ("always", "sometimes"), ("always", "rarely"), ("before", "after"), ("more", "less"),
    ("most", "least"), ("on", "off"), ("true", "false"), ("yes", "no"), ("open", "closed"), ("start", "stop"),
    ("starts", "stops"), ("started", "stopped"), ("loves", "hates"), ("likes", "hates"), ("love", "hate"),
    ("like", "hate"), ("include", "exclude"), ("includes", "excludes"), ("included", "excluded"), ("add", "remove"),
    ("increase", "decrease"), ("increased", "decreased"), ("rise", "fall"), ("above", "below"), ("minimum", "maximum"),
    ("min", "max"), ("public", "private"), ("required", "optional"), ("passed", "failed"), ("succeeded", "failed"),
    ("success", "failure"), ("present", "absent"), ("online", "offline"), ("internal", "external"),
    ("approved", "rejected"), ("approve", "reject"), ("opt-in", "opt-out"), ("in", "out"), ("up", "down"),
)  # fmt: skip
_OPPOSITE_PREFIXES: Final = ("un", "dis", "in", "im", "ir", "il", "non", "non-", "de", "mis")

_COUNTS: Final = {
    word: str(number)
    for number, word in enumerate(
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    )
} | {
    "thirteen": "13", "fourteen": "14", "fifteen": "15", "sixteen": "16", "seventeen": "17", "eighteen": "18",
    "nineteen": "19", "twenty": "20", "thirty": "30", "forty": "40", "fifty": "50", "sixty": "60", "seventy": "70",
    "eighty": "80", "ninety": "90", "hundred": "100", "thousand": "1000", "million": "1000000",
    "billion": "1000000000", "dozen": "12", "half": "0.5", "first": "1", "second": "2", "third": "3", "once": "1",
    "twice": "2", "double": "2", "triple": "3",
}  # fmt: skip

_DATES: Final = word_set(
    "january february march april may june july august september october november december "
    "jan feb mar apr jun jul aug sep sept oct nov dec "
    "monday tuesday wednesday thursday friday saturday sunday mon tue tues wed thu thur thurs fri sat sun "
    "today tomorrow yesterday morning noon afternoon evening night midnight weekend weekends weekday weekdays "
    "daily weekly monthly quarterly yearly hourly annually spring summer autumn winter am pm a.m p.m utc gmt cet"
)
_ALSO_WORDS: Final = word_set("march may mar jun sat sun wed mon am second")
"""Dates and numbers that are also other words: they count as a date only if capitalised."""

_UNITS: Final = word_set(
    "ms s sec min h d w m km cm mm g kg mg t l ml b kb mb gb tb pb kib mib gib tib bit bits byte bytes "
    "usd eur gbp chf jpy dollar dollars euro euros cent cents pound pounds percent "
    "second seconds minute minutes hour hours day days week weeks month months year years "
    "milliseconds hz khz mhz ghz rpm rps k bn am pm"
)

# A capitalised first word that is one of these is no name.
_COMMON: Final = word_set(
    "a an the this that these those it its they them their he she his her we us our you your i my me one "
    "and or but if then else than as of at by for from in into on onto to with within over under about per via "
    "is are was were be been being has have had do does did done will would can could should must may might shall "
    "what when where which who whom whose why how there here so such some any all each every both few many much more "
    "most other another same own only also just even still yet very too again please let ok yes use new old last next"
)
_PREDICATES: Final = word_set(
    "is are was were be been has have had do does did don't doesn't didn't will would can cannot can't could should "
    "must may might shall want wants wanted need needs prefer prefers like likes use uses cost costs take takes run "
    "runs live lives work works expire expires start starts end ends contain contains allow allows accept accepts "
    "require requires support supports own owns equal equals mean means weigh weighs last lasts open opens "
    "isn't aren't wasn't weren't hasn't haven't won't wouldn't shouldn't stays stay remains remain goes go gets get"
)

_TOKEN: Final = re.compile(
    r"(?P<date>\d{4}-\d{1,2}(?:-\d{1,2})?(?:T[\d:.]{1,30}Z?)?|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{1,2}:\d{2}(?::\d{2})?)"
    r"|(?P<number>[-+]?(?:\d{1,3}(?:,\d{3}){1,9}(?:\.\d{1,40})?|\d{0,40}\.\d{1,40}|\d{1,40}))(?!\w)"
    r"|(?P<word>[@#]?\w{1,200}(?:[-'./@:#+]{1,9}\w{1,200}){0,50}[+#]{0,9})"
    r"|(?P<sign>[%€$£=:])"
)
_GLUED: Final = re.compile(r"(\d{1,40}(?:[.,]\d{1,40}){0,9})([a-zµ]{1,4})")
_SENTENCE_START: Final = re.compile(r"(?:^|[.!?:\n\"“(])\s*$")
_IDENTIFIER: Final = re.compile(r"[a-z][A-Z]|[A-Z]{2}|[\d_@#/]|\w[.:+]\w|[+#]$")
"""Part of a word that makes it a name: capitals inside, digits, a path, an address."""

_STEM: Final = 4
"""First letters by which two inflections of a word are the same."""


class _Value(NamedTuple):
    kind: _Kind
    text: str
    place: int


class _Statement:
    """Words and values of a text.

    Attributes:
        words: Words in lower case.
        values: Negations, numbers, dates and names, in their order.
        starts: Capitalised first words of sentences, which may be names.
        predicate: Place of the first predicate; values before it name what the text is about.
    """

    def __init__(self, text: str) -> None:
        self.words: list[str] = []
        self.values: list[_Value] = []
        self.starts: set[str] = set()
        text = unicodedata.normalize("NFKC", text).replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
        for match in _TOKEN.finditer(text):
            first = _SENTENCE_START.search(text, 0, match.start()) is not None
            self._add(match.group(), match.lastgroup or "", first=first)
        places = (at for at, word in enumerate(self.words) if _is_predicate(word))
        self.predicate = next(places, min(1, len(self.words)))

    def _add(self, written: str, kind: str, *, first: bool) -> None:
        word, capital = written.casefold().removesuffix("'s"), written[0].isupper()
        singular = word.removesuffix("s")
        ambiguous = word in _ALSO_WORDS and not capital
        if kind == "date":
            self._value(_Kind.DATE, word)
        elif kind == "number":
            self._value(_Kind.NUMBER, _number(word))
        elif kind == "sign":
            if word not in ":=":
                self._value(_Kind.NUMBER, word)
        elif word in _NEGATIONS or word.endswith("n't"):
            self._value(_Kind.NEGATION, word)
        elif (word in _DATES or singular in _DATES) and not ambiguous:
            self._value(_Kind.DATE, singular)
        elif word in _COUNTS and not ambiguous and not (word == "one" and first):
            self._value(_Kind.NUMBER, _COUNTS[word])
        elif glued := _GLUED.fullmatch(word):
            self._value(_Kind.NUMBER, _number(glued[1]))
            self._value(_Kind.NUMBER, glued[2])
        elif word in _UNITS and self._after_number():
            self._value(_Kind.NUMBER, singular if len(word) > _STEM else word)
        elif _IDENTIFIER.search(written) or (capital and not first and word not in _COMMON):
            self._value(_Kind.NAME, word)
        elif capital and word not in _COMMON:
            self.starts.add(word)
        self.words.append(word)

    def _value(self, kind: _Kind, text: str) -> None:
        self.values.append(_Value(kind, text, len(self.words)))

    def _after_number(self) -> bool:
        return bool(self.values) and self.values[-1][::2] == (_Kind.NUMBER, len(self.words) - 1)

    def of(self, kind: _Kind) -> list[_Value]:
        return [one for one in self.values if one.kind is kind]

    def negated(self) -> set[str]:
        """Return the first significant word after each negation."""
        after = (self.words[one.place + 1 :] for one in self.of(_Kind.NEGATION))
        return {word for rest in after for word in [one for one in rest if one not in _COMMON][:1]}

    def names(self, other: _Statement) -> list[_Value]:
        """Return the names, each once, compared with another text: one of its plain words is no name."""
        mine, others = ({one.text for one in text.of(_Kind.NAME)} for text in (self, other))
        plain = {*other.words} - others - other.starts
        found = [one for one in self.of(_Kind.NAME) if one.text not in plain]
        alike = {*self.words} & {*other.words} - _COMMON
        for word in self.starts:
            known = not alike or any(word[:_STEM] == there[:_STEM] for there in other.words)
            if word in others or word in mine or not known:
                found.append(_Value(_Kind.NAME, word, self.words.index(word)))
        return list({one.text: one for one in sorted(found, key=lambda one: -one.place)}.values())[::-1]


def _is_predicate(word: str) -> bool:
    return word in _PREDICATES or word in (":", "=") or (word.endswith("ed") and len(word) > _STEM)


def _number(written: str) -> str:
    plain = written.replace(",", "").removeprefix("+")
    try:
        return f"{float(plain):.12g}"
    except ValueError:
        return plain


def _compare(old: str, new: str) -> tuple[frozenset[_Kind], bool]:
    """Return the kinds of differences, and whether a value that names what the text is about differs."""
    first, second = _Statement(old), _Statement(new)
    kinds, about = set(), False
    if _negation_differs(first, second):
        kinds.add(_Kind.NEGATION)
    for kind in (_Kind.NUMBER, _Kind.DATE, _Kind.NAME):
        if kind is _Kind.NAME:
            left, right = first.names(second), second.names(first)
        else:
            left, right = first.of(kind), second.of(kind)
        there = [one.text for one in left], [one.text for one in right]
        if there[0] != there[1]:
            kinds.add(kind)
            subjects = [
                [one.text for one in values if one.place < text.predicate]
                for values, text in ((left, first), (right, second))
            ]
            about = about or subjects[0] != subjects[1]
    return frozenset(kinds), about


def _negation_differs(first: _Statement, second: _Statement) -> bool:
    if len(first.of(_Kind.NEGATION)) != len(second.of(_Kind.NEGATION)):
        return True
    negated = first.negated(), second.negated()
    if (negated[0] - negated[1]) & {*second.words} or (negated[1] - negated[0]) & {*first.words}:
        return True  # "X, not Y" and "Y, not X"
    removed, added = {*first.words} - {*second.words}, {*second.words} - {*first.words}
    if any((a in removed and b in added) or (b in removed and a in added) for a, b in _OPPOSITES):
        return True
    pairs = ((word, other) for one, two in ((removed, added), (added, removed)) for word in one for other in two)
    return any(
        len(other) >= _STEM - 1 and word.endswith(other) and word.removesuffix(other) in _OPPOSITE_PREFIXES
        for word, other in pairs
    )


def relation(old: str, new: str) -> Literal["conflicts", "supersedes"] | None:
    """Return the relation of a newer text to an older one of similar meaning; None if none is recognised.

    A text with another negation `conflicts` with the older one. A text that gives another number, date or name for the
    same attribute `supersedes` it. A value before the first predicate names what the text is about: "Order 17 is paid"
    and "Order 18 is paid" are not related.
    """
    kinds, about = _compare(old, new)
    if not kinds or about:
        return None
    return "conflicts" if _Kind.NEGATION in kinds else "supersedes"
