"""Strategies for hostile stream entries: each is the fields of one XADD that bypasses the producer and its checks.

Envelopes name tasks of tests/support/programs/target.py. The poster puts an id of its own into an entry that has one,
so that the outcome of each entry is known.
"""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import strategies as st

__all__ = ["DECOY", "ID", "Fields", "classics", "hostile_entries"]

Fields = list[tuple[bytes, bytes]]
"""Names and values, in their order; a name may come twice."""

ID = "ID-OF-ITS-OWN"
"""Stands for the id in an envelope."""

MEBIBYTE = 1024 * 1024

NASTY_TEXTS = (
    "",
    " ",
    "\x00",
    "\x1b[2J\x1b]0;owned\x07",
    "\r\n\r\nperdure: all is well",
    "\u202egnp.exe",
    "\u2028\u2029\ufeff\u200f",
    "../../etc/passwd",
    "x:steps",
    "{perdure:target:0}:ready",
    "'; FLUSHALL; --",
    "%s%n{0}{extra[id]}<red>",
    "\U0001f4a9" * 40,
    "NaN",
    "-0",
    "a" * 300,
)

NASTY_JSON = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-1e999",
    b"1e-999",
    b"-0",
    b"-0.0",
    b"1" + b"0" * 400,
    b"9" * 5000,
    b"9223372036854775808",
    b"18446744073709551616",
    b"-9223372036854775809",
    b"1.7976931348623157e308",
    b"1e308",
    b"1e-308",
    b'"\\ud800"',
    b'"\\udc00\\ud800"',
    b'"\\u0000"',
    b'"\xed\xa0\x80"',
    b'"\xff"',
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'"1"',
    b'"1e3"',
    b"[" * 10_000 + b"]" * 10_000,
    b"[" * 10_000,
    b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    b"[" * 600 + b"]" * 600,
    b"[" * 190 + b"]" * 190,
    b'{"a":1,"a":2}',
    b"[1,]",
    b"01",
    b"\xef\xbb\xbf{}",
    b"{}{}",
    b"",
)

NAMES = ("typed", "echo", "tree", "raises", "keeps", "unheard-of")

LARGE = (
    b'"' + b"x" * MEBIBYTE + b'"',
    b"[" + b"0," * 999_999 + b"0]",
    b'"' + b"\\u00e9" * (MEBIBYTE // 6) + b'"',
    b"{" + b",".join(b'"k%d":%d' % (n, n) for n in range(50_000)) + b"}",
)

texts = st.sampled_from(NASTY_TEXTS) | st.text(max_size=20)
raw = st.sampled_from(NASTY_JSON)
plain_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def dumped(value: Any) -> bytes:
    """JSON, as another language's producer might make it."""
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_SUBCLASS)


def _dumped_or_text(value: Any) -> bytes:
    try:
        return dumped(value)
    except TypeError:  # an integer beyond 64 bits, a lone surrogate
        return repr(value).replace("'", '"').encode("utf-8", "surrogatepass")


values = plain_values.map(_dumped_or_text) | raw


def _object(members: dict[str, bytes]) -> bytes:
    return b"{" + b",".join(orjson.dumps(name) + b":" + value for name, value in members.items()) + b"}"


ARGUMENTS: dict[str, tuple[str, ...]] = {
    "typed": ("number", "ratio", "name", "tags", "when", "amount", "link"),
    "echo": ("value",),
    "tree": ("root",),
    "raises": ("text",),
    "keeps": ("value",),
    "unheard-of": ("value",),
}

FITTING: dict[str, bytes] = {
    "number": b"7",
    "ratio": b"0.5",
    "name": b'"name"',
    "tags": b'["a","b"]',
    "when": b'"2026-11-21T00:00:00Z"',
    "amount": b'"12.50"',
    "link": b'{"href":"x","weight":1}',
    "value": b"1",
    "root": b'{"name":"r","children":[{"name":"c","children":[]}]}',
    "text": b'"text"',
}


@st.composite
def arguments(draw: st.DrawFn, name: str) -> bytes:
    """Return valid arguments, with one or two exceptions."""
    members = {one: FITTING[one] for one in ARGUMENTS[name]}
    for one in draw(st.lists(st.sampled_from(ARGUMENTS[name]), max_size=2)):
        members[one] = draw(values)
    if draw(st.integers(0, 9)) == 0:
        members[draw(texts)] = draw(values)
    return draw(raw) if draw(st.integers(0, 14)) == 0 else _object(members)


def _envelope(name: str, **changes: bytes) -> bytes:
    members = {"v": b"1", "id": dumped(ID), "task": dumped(name)} | changes
    return _object({key: value for key, value in members.items() if value != b"(none)"})


OPTIONS = ("timeout", "max_attempts", "result_ttl", "unknown")
SIZES = (
    b"-1",
    b"0",
    b"1e-9",
    b"1e308",
    b"1e300",
    b"1e18",
    b"1e11",
    b"86400",
    b"1" + b"0" * 400,
    b"NaN",
    b'"60"',
    b"2.5",
)


ATTEMPTS = (b"-1", b"0", b"1", b"3", b"2.5", b'"2"', b"NaN", b"null", b"[]", b"true")


@st.composite
def options(draw: st.DrawFn) -> bytes:
    """Limits that make no sense, or that no clock can hold."""
    most = draw(st.sampled_from([1, 1, 1, 3]))
    chosen = draw(st.lists(st.sampled_from(OPTIONS), min_size=1, max_size=most, unique=True))
    sizes = {one: st.sampled_from(SIZES) | values for one in OPTIONS}
    sizes["max_attempts"] = st.sampled_from(ATTEMPTS)  # a million of them would be tried, as asked for
    return _object({one: draw(sizes[one]) for one in chosen})


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    many = draw(st.sampled_from([1, 1, 3, 2000]))
    return _object({f"{draw(texts) if n < 3 else n}": dumped(draw(texts)) if n < 3 else b'"v"' for n in range(many)})


@st.composite
def tasks(draw: st.DrawFn) -> Fields:
    """A message in form, for a handler that exists, with arguments that may be anything."""
    name = draw(st.sampled_from(NAMES))
    changes: dict[str, bytes] = {}
    if draw(st.integers(0, 2)) == 0:
        changes["options"] = draw(options())
    if draw(st.integers(0, 3)) == 0:
        changes["headers"] = draw(headers())
    fields = [(b"env", _envelope(name, **changes)), (b"args", draw(arguments(name)))]
    return fields + draw(st.sampled_from([[], [], [(b"again", b"1")], [(b"args", b"{}")], [(b"env", b"{}")]]))


DECOY = "decoy"
"""The id of a task that is there already."""

IDS = (
    b'"decoy"',
    b'"x:steps"',
    b'"a b"',
    b'"../x"',
    b'"{x}"',
    b'""',
    b'"x\\n"',
    b"7",
    b"null",
    b'["x"]',
    b'"' + b"i" * 129 + b'"',
)


@st.composite
def confused(draw: st.DrawFn) -> Fields:
    """An envelope in which something is of another type, of another version, missing, or said twice."""
    name = draw(st.sampled_from(NAMES))
    member = draw(st.sampled_from(["v", "id", "task", "headers", "options"]))
    wrong = draw(st.sampled_from(IDS) if member == "id" else values | st.sampled_from([b"(none)", b"2", b"99"]))
    envelope = _envelope(name, **{member: wrong})
    if draw(st.integers(0, 4)) == 0:
        envelope = envelope[:-1] + b',"id":' + dumped(ID) + b',"task":"echo","v":1}'
    return [(b"env", envelope), (b"args", b'{"value":1}')]


@st.composite
def broken(draw: st.DrawFn) -> Fields:
    """An envelope that was cut off, or of which some bits fell over."""
    name = draw(st.sampled_from(NAMES))
    data = bytearray(_envelope(name, headers=b'{"trace":"00-ab"}', options=b'{"timeout":5}'))
    if draw(st.booleans()):
        del data[draw(st.integers(0, len(data))) :]
    for _ in range(draw(st.integers(0, 3))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    return [(b"env", bytes(data)), (b"args", draw(arguments(name)))]


FIELDS = (b"env", b"args", b"again", b"id", b"raw:env", b"", b"\x1b[2J", b"at")


@st.composite
def junk(draw: st.DrawFn) -> Fields:
    """No task at all."""
    names = st.binary(max_size=12) | st.sampled_from(
        [b"env", b"args", b"again", b"id", b"raw:env", b"", b"\x1b[2J", b"at"]
    )
    return draw(st.lists(st.tuples(names, st.binary(max_size=60)), min_size=1, max_size=6))


many_fields = st.sampled_from([501, 2_000, 20_000]).map(lambda n: [(b"f%d" % k, b"x") for k in range(n)])


@st.composite
def large(draw: st.DrawFn) -> Fields:
    """A mebibyte and more, in every place."""
    payload = draw(st.sampled_from(LARGE))
    name = draw(st.sampled_from(["echo", "keeps", "typed", "raises"]))
    argument = ARGUMENTS[name][0]
    where = draw(st.sampled_from(["argument", "argument", "headers", "task", "raw"]))
    if where == "argument":
        return [(b"env", _envelope(name)), (b"args", _object({argument: payload}))]
    if where == "raw":
        return [(b"env", payload), (b"args", payload)]
    changes = {"task": payload} if where == "task" else {"headers": b'{"h":%b}' % payload}
    return [(b"env", _envelope(name, **changes)), (b"args", b'{"value":1}')]


def hostile_entries() -> st.SearchStrategy[Fields]:
    """One in a few hundred is large: those take as long as all the others together."""
    kinds = {"tasks": tasks(), "confused": confused(), "broken": broken(), "junk": junk()}
    small = st.integers(0, 99).flatmap(
        lambda roll: many_fields if roll == 99 else list(kinds.values())[(0, 0, 0, 0, 1, 2, 3)[roll % 7]]
    )
    return st.integers(0, 299).flatmap(lambda roll: large() if roll == 299 else small)


def classics() -> list[Fields]:
    """Entries that did harm before, or most easily could: part of every run, for every seed."""
    one = b'{"value":1}'
    options = ("result_ttl", b"1e18"), ("result_ttl", b"1e308"), ("timeout", b"1e308"), ("result_ttl", b"1e-9")
    return [
        *([(name, name)] for name in FIELDS),
        *([(b"env", _envelope("echo", options=_object({name: size}))), (b"args", one)] for name, size in options),
        *([(b"env", _envelope("echo", headers=_object({"h": dumped(text)}))), (b"args", one)] for text in NASTY_TEXTS),
        *([(b"env", _envelope(text)), (b"args", one)] for text in NASTY_TEXTS),
        *([(b"env", _envelope("raises")), (b"args", _object({"text": dumped(text)}))] for text in NASTY_TEXTS),
        *(
            [(b"env", _envelope(name)), (b"args", b'{"value":%b}' % value)]
            for name in NAMES[:2]
            for value in NASTY_JSON
        ),
        *([(b"env", _envelope(NAMES[-1])), (b"args", b'{"value":%b}' % value)] for value in NASTY_JSON),
        *([(b"env", value), (b"args", value)] for value in NASTY_JSON),
        [(b"f%d" % number, b"x") for number in range(20_000)],
        *([(b"env", _envelope("echo")), (b"args", b'{"value":%b}' % payload)] for payload in LARGE),
    ]
