"""What travels: data that any version can read, or refuse with a reason."""

from __future__ import annotations

import math
import time
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from perdure.queues import PayloadTooLarge, UnreadableEnvelope
from perdure.queues.envelope import (
    FORMAT_VERSION,
    MAX_KEY_LENGTH,
    MAX_TAG_LENGTH,
    MAX_TAGS,
    Envelope,
    EnvelopeTemplate,
    Options,
    check_size,
    encode_arguments,
    new_task_id,
    newer_envelope,
)
from perdure.queues.keys import DATA_FORMAT
from perdure.queues.partitions.route import spread

IDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
OPTIONS = st.builds(
    Options,
    timeout=st.none() | st.floats(min_value=1e-6, max_value=1e9),
    max_attempts=st.none() | st.integers(1, 10**6),
    result_ttl=st.none() | st.floats(min_value=1e-6, max_value=1e9),
)
ENVELOPES = st.builds(
    Envelope,
    id=IDS,
    task=TEXT.filter(lambda text: 0 < len(text) <= 256),
    headers=st.dictionaries(TEXT, TEXT, max_size=5),
    options=OPTIONS,
    secrets=st.lists(st.lists(TEXT, max_size=3).map(tuple), max_size=3).map(tuple),
    requires=st.integers(0, 10**6),
    key=st.none() | TEXT.filter(lambda text: len(text) <= MAX_KEY_LENGTH),
    tags=st.lists(TEXT.filter(lambda text: 0 < len(text) <= MAX_TAG_LENGTH), max_size=3).map(tuple),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(ENVELOPES)
def test_what_was_sent_is_what_is_read(envelope: Envelope) -> None:
    assert Envelope.decode(envelope.encode()) == envelope


@given(ENVELOPES)
def test_it_is_one_json_object_with_its_version(envelope: Envelope) -> None:
    found = orjson.loads(envelope.encode())
    assert (found["v"], found["id"], found["task"]) == (FORMAT_VERSION, envelope.id, envelope.task)


def test_what_is_not_said_is_not_sent() -> None:
    assert Envelope(id="x", task="t").encode() == b'{"v":1,"id":"x","task":"t"}'


@given(ENVELOPES, st.dictionaries(TEXT.map(lambda text: "new_" + text), JSON, max_size=4))
def test_what_a_newer_producer_adds_is_ignored(envelope: Envelope, added: dict[str, Any]) -> None:
    fields = orjson.loads(envelope.encode()) | added
    fields["options"] = fields.get("options", {}) | added
    assert Envelope.decode(orjson.dumps(fields)) == envelope


@given(st.integers(FORMAT_VERSION + 1, 2**53))
def test_a_version_to_come_is_refused_with_what_to_do(version: int) -> None:
    data = orjson.dumps({"v": version, "id": "x", "task": "t"})
    with pytest.raises(UnreadableEnvelope, match=f"version {version}.*upgrade the worker, then replay"):
        Envelope.decode(data)
    newer = newer_envelope(data)
    assert newer is not None
    assert (newer.v, newer.id, newer.task, newer.requires) == (version, "x", "t", DATA_FORMAT + 1)


@given(st.integers(-(2**53), 2**53), JSON)
def test_the_id_and_the_format_of_a_newer_envelope_are_known_whatever_else_it_has(needed: int, task: Any) -> None:
    fields = {"v": FORMAT_VERSION + 1, "id": "x", "task": task, "options": [], "secrets": {}, "requires": needed}
    newer = newer_envelope(orjson.dumps(fields))
    known = 0 < len(task) <= 256 if isinstance(task, str) else True
    if not known or needed > 1_000_000:
        assert newer is None
    else:
        assert newer is not None
        assert (newer.id, newer.requires) == ("x", max(DATA_FORMAT + 1, needed))
        assert newer.task == (task if isinstance(task, str) else "?")


@given(st.binary(max_size=64) | JSON.map(orjson.dumps))
@example(b"")
@example(b"null")
@example(b"[]")
@example(b'{"v":1}')
@example(b'{"v":1,"id":"x","task":""}')
@example(b'{"v":1,"id":"x:y","task":"t"}')
@example(b'{"v":1,"id":"~x","task":"t"}')
@example(b'{"v":"one","id":"x","task":"t"}')
@example(b'{"v":1,"id":"x","task":"t","headers":{"a":1}}')
@example(b'{"v":1,"id":"x","task":"t","options":{"timeout":-1}}')
@example(b'{"v":1,"id":"x","task":"t","options":{"timeout":1e999}}')
@example(b'{"v":1,"id":"x","task":"\xff"}')
@example(b"[" * 100_000)
def test_what_is_no_envelope_is_refused_and_nothing_worse(data: bytes) -> None:
    try:
        envelope = Envelope.decode(data)
    except UnreadableEnvelope as error:
        assert str(error)
        assert newer_envelope(data) is None
    else:
        assert orjson.loads(data)["id"] == envelope.id


def test_a_refusal_says_where_and_keeps_the_payload_to_itself() -> None:
    with pytest.raises(UnreadableEnvelope, match="not an envelope: id: ") as refused:
        Envelope.decode(b'{"v":1,"id":"no spaces here","task":"t"}')
    assert "no spaces here" not in str(refused.value)


@given(IDS)
def test_an_id_can_stand_in_a_key(task_id: str) -> None:
    assert Envelope(id=task_id, task="t").id == task_id


@pytest.mark.parametrize("wrong", ["", "-x", ".x", "_x", "a:b", "a b", "a/b", "ä", "x\n", "{x}", "x" * 129])
def test_an_id_that_cannot_stand_in_a_key_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="id"):
        Envelope(id=wrong, task="t")


def test_new_ids_are_unique_sorted_by_time_and_valid() -> None:
    ids = [new_task_id() for _ in range(1_000)]
    assert len(set(ids)) == 1_000
    assert ids == sorted(ids)
    first = int(ids[0].replace("-", "")[:12], 16)
    assert abs(first - time.time() * 1000) < 60_000
    assert all(Envelope(id=one, task="t") for one in ids[:3])


@given(st.dictionaries(TEXT, JSON, max_size=5))
def test_arguments_are_one_json_object(arguments: dict[str, Any]) -> None:
    assert orjson.loads(encode_arguments(arguments)[0]) == orjson.loads(orjson.dumps(arguments))


@pytest.mark.parametrize("wrong", [object(), {1, 2}, b"bytes", 2**64, {1: 2}])
def test_arguments_that_are_not_json_are_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="could not encode the arguments as JSON"):
        encode_arguments({"value": wrong})


def test_arguments_without_a_json_form_become_text() -> None:
    given = {"loss": math.nan, "best": [-math.inf], "emoji": "half \ud83d", "none": None}
    stored = orjson.loads(encode_arguments(given)[0])
    assert stored == {"loss": "NaN", "best": ["-Infinity"], "emoji": "half \ufffd", "none": None}


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_size_is_refused_above_the_limit_only(size: int, limit: int) -> None:
    if size <= limit:
        check_size("it", size, limit)
    else:
        with pytest.raises(PayloadTooLarge) as refused:
            check_size("it", size, limit)
        assert (refused.value.what, refused.value.size, refused.value.limit) == ("it", size, limit)


@given(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    st.dictionaries(TEXT, TEXT, max_size=3),
    st.none() | OPTIONS,
    st.none() | st.text(st.characters(codec="utf-8"), max_size=MAX_KEY_LENGTH),
    st.lists(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=MAX_TAG_LENGTH), max_size=MAX_TAGS, unique=True
    ),
)
def test_a_form_makes_the_envelopes_that_it_stands_for(
    task: str, headers: dict[str, str], options: Options | None, key: str | None, tags: list[str]
) -> None:
    message = EnvelopeTemplate(task, headers, options, tags).message(b"{}", task_id="order-7", key=key)
    known: dict[str, Any] = {"task": task, "headers": headers, "options": options or Options()}
    envelope = Envelope(id="order-7", key=key, tags=tuple(tags), **known)
    assert orjson.loads(message.envelope) == orjson.loads(envelope.encode())
    assert Envelope.decode(message.envelope) == envelope


def test_the_number_of_a_task_is_that_of_its_key_or_of_its_own_id() -> None:
    form = EnvelopeTemplate("t")
    assert form.message(b"{}").number is None
    assert form.message(b"{}", key="k").number == spread("k")
    assert form.message(b"{}", task_id="x").number == spread("x")
    assert form.message(b"{}", key="k", task_id="x").number == spread("k")
    assert [form.message(b"{}", task_id=one).own_id for one in (None, "x")] == [False, True]


@pytest.mark.parametrize(("task", "headers"), [("", {}), ("t" * 257, {}), ("t", {"n": 1})])
def test_what_no_envelope_can_have_makes_no_form(task: str, headers: Any) -> None:
    with pytest.raises(ValueError, match=r"task|headers"):
        EnvelopeTemplate(task, headers)


@pytest.mark.parametrize(
    "tags", ["nightly", [""], ["t" * (MAX_TAG_LENGTH + 1)], list(map(str, range(MAX_TAGS + 1))), [1]]
)
def test_tags_are_few_and_short(tags: Any) -> None:
    with pytest.raises(ValueError, match="tags"):
        EnvelopeTemplate("t", tags=tags)
    assert Envelope.decode(EnvelopeTemplate("t", tags=["a", "b", "a"]).message(b"{}").envelope).tags == ("a", "b")


def test_a_key_is_short() -> None:
    with pytest.raises(ValueError, match="key must have at most 256 characters, got 257"):
        EnvelopeTemplate("t").message(b"{}", key="k" * 257)
