"""Secret arguments: only the handler receives their values."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loguru import logger as loguru_logger
from perdure import App, Context, InvalidArguments, Retry, Settings, TaskFailed, Worker
from perdure.deadletter.burial import Evidence
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import DecryptionError, UnreadableEnvelope
from perdure.queues.envelope import Envelope
from perdure.queues.security.redaction import Redaction
from perdure.queues.security.secret_arguments import (
    EVERYTHING,
    MASK,
    mask,
    read_secret_paths,
    restore_masked,
    schema_secrets,
    secret_values,
    unwrap_secrets,
)
from perdure.queues.sessions.record import SessionAddress
from perdure.queues.sessions.turns import SessionTurnEnd, end_turn, send_to_session
from perdure.worker.agents.journal.forks import fork
from perdure.worker.log import logger
from pydantic import BaseModel, Field, RootModel, Secret, SecretBytes, SecretStr, TypeAdapter, ValidationError

from tests.support.command_line import Answer, call
from tests.support.stored_data import FIRST, everything, with_keys
from tests.support.workers import bounded, history, letter, partition_of, recorded_steps, redis_command, work_off

TOKEN = "s3cr3t-t0ken-of-ada"


class Account(BaseModel):
    user: str
    password: SecretStr
    spare: list[SecretStr] = []
    key: SecretBytes | None = None


@dataclasses.dataclass
class Box:
    label: str
    inside: SecretStr


class Tokens(RootModel[list[SecretStr]]):
    pass


def _fail(message: str) -> None:
    raise ValueError(message)


def build(settings: Settings | None = None) -> App:
    app = App("secrets", settings=settings)

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def log_in(ctx: Context, token: SecretStr, how: str = "well", account: Account | None = None) -> str:
        value = token.get_secret_value()
        await ctx.step("plain", asyncio.sleep, 0, value)
        await ctx.step("secret", len, [token])
        if how == "raises":
            raise ValueError(f"cannot log in with {value!r}")
        if how == "fails at length":
            await ctx.step("long", _fail, "x" * 1330 + value + "y" * 9000)
        if how == "validates":
            TypeAdapter(int).validate_python(f"{value}" * 9)
        if how == "chains":
            try:
                raise KeyError(value)
            except KeyError as error:
                raise RuntimeError("it failed") from error
        if how == "mismatch":
            await ctx.step("steps", lambda given: given, value)
        return str(len(value))

    return app


# the value and its JSON form


class Everything(BaseModel):
    one: SecretStr
    number: Secret[int]
    renamed: SecretStr = Field(serialization_alias="other")
    mapping: dict[str, SecretStr]
    accounts: list[Account]
    box: Box
    tokens: Tokens
    pair: tuple[int, SecretStr]
    chosen: SecretStr | int
    nothing: SecretStr | None


def test_secrets_are_found_at_any_depth() -> None:
    value = Everything.model_validate(
        {
            "one": "1-secret",
            "number": 42,
            "renamed": "2-secret",
            "mapping": {"a": "3-secret"},
            "accounts": [{"user": "ada", "password": "4-secret", "spare": ["5-secret"], "key": b"6-secret"}],
            "box": {"label": "l", "inside": "7-secret"},
            "tokens": ["8-secret"],
            "pair": [1, "9-secret"],
            "chosen": "a-secret",
            "nothing": None,
        }
    )
    data, marks = unwrap_secrets({"it": value}, {"it": value.model_dump(mode="json")})
    assert Everything.model_validate(data["it"]) == value
    assert secret_values(orjson.dumps(data), marks) == [
        *["1-secret", "42", "2-secret", "3-secret", "4-secret", "5-secret", "6-secret"],
        *["7-secret", "8-secret", "1", "9-secret", "a-secret"],
    ]
    hidden = mask(orjson.dumps(data), marks)
    assert b"secret" not in hidden
    assert orjson.loads(hidden)["it"]["accounts"][0]["user"] == "ada"
    assert orjson.loads(hidden)["it"]["nothing"] is None


json_data = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), json_data, max_size=4), st.data())
def test_masked_values_are_restored_unchanged(arguments: dict[str, Any], draw: st.DataObject) -> None:
    names = st.sampled_from([*arguments, "*", "no"])
    marks = tuple(draw.draw(st.lists(st.lists(names, max_size=3).map(tuple), max_size=3)))
    data = orjson.dumps(arguments)
    hidden = mask(data, marks)
    if MASK.encode() not in data:
        assert orjson.loads(restore_masked(hidden, lambda: data, marks)) == arguments


def test_large_integers_survive_an_edit() -> None:
    data = b'{"token":"secret","number":123456789012345678901234567890}'
    edited = b'{"token":"%b","number":223456789012345678901234567890}' % MASK.encode()
    assert restore_masked(edited, lambda: data, (("token",),)) == data.replace(b":1", b":2")


def test_unreadable_arguments_are_masked_as_a_whole() -> None:
    assert orjson.loads(mask(b'{"token": "abc', (("token",),))) == MASK
    assert orjson.loads(mask(b'{"token": "abc"}', EVERYTHING)) == MASK


@given(st.text(min_size=4, max_size=20))
def test_redaction_removes_a_secret_from_any_text(secret: str) -> None:
    redact = Redaction([secret])
    for text in (secret, f"a {secret} b", repr({"x": secret}), orjson.dumps([secret]).decode(), repr(secret.encode())):
        if secret not in MASK and MASK not in text:
            assert secret not in redact(text)
            assert MASK in redact(text)


def test_redaction_removes_every_occurrence() -> None:
    redact = Redaction([TOKEN, "another"])
    assert redact(f"{TOKEN} and {TOKEN}, then another and another") == f"{MASK} and {MASK}, then {MASK} and {MASK}"
    quoted = "input_value='a', input_type=str"
    assert redact(f"{quoted}; {quoted}") == "input_type=str; input_type=str"


AWKWARD = 'p@ss/w\u00f6rd+&=?~ "Stra\u00dfe"\\%'

ENCODINGS: dict[str, Callable[[str], str]] = {
    "quote": quote,
    "quote of all": lambda text: quote(text, safe=""),
    "quote_plus": quote_plus,
    "lower case escapes": lambda text: quote_plus(text).replace("%C3%B6", "%c3%b6").replace("%2F", "%2f"),
    "hex": lambda text: text.encode().hex(),
    "upper hex": lambda text: text.encode().hex().upper(),
    "upper": str.upper,
    "lower": str.lower,
    "casefold": str.casefold,
    "swapcase": str.swapcase,
    "title": str.title,
    "JSON": lambda text: json.dumps(text)[1:-1],
    "JSON in UTF-8": lambda text: orjson.dumps(text).decode()[1:-1],
}
for encoder in (base64.b64encode, base64.urlsafe_b64encode):
    for head in ("", "u", "u:", "u:s", "user:"):
        for tail in ("", "!", "!!"):

            def in_base64(text: str, encode: Any = encoder, head: str = head, tail: str = tail) -> str:
                return str(encode((head + text + tail).encode()).decode())

            ENCODINGS[f"{encoder.__name__} {head!r} {tail!r}"] = in_base64


@pytest.mark.parametrize("others", [0, 60], ids=["alone", "among many"])
@pytest.mark.parametrize("secret", [TOKEN, AWKWARD, "\u0130zmir-\u03a3\u0391\u03a3", "12345678", "\x00" + TOKEN[:7]])
@pytest.mark.parametrize("name", ENCODINGS)
def test_encoded_forms_of_a_secret_are_removed(name: str, secret: str, others: int) -> None:
    redact = Redaction([secret, *(f"another-{number}-of-them" for number in range(others))])
    encoded = ENCODINGS[name](secret)
    whole = f"POST https://host/x?token={encoded}&y=1 failed (401)"
    shown = redact(whole)
    assert shown.startswith("POST https://host/x?token=")
    assert shown.endswith("&y=1 failed (401)")
    left = shown.removeprefix("POST https://host/x?token=").removesuffix("&y=1 failed (401)")
    assert MASK in left
    rest = left.replace(MASK, "")
    assert len(rest) <= 12  # the text beside the secret in Base64, padding included
    if "b64" in name:  # no character that is left holds a bit of the secret
        head, tail = left.split(MASK)
        known = base64.urlsafe_b64decode(head[: len(head) // 4 * 4]).decode(errors="replace")
        assert "user:".startswith(known) or "u:s".startswith(known)
        assert secret[:2] not in head + tail


def test_forms_of_short_secrets_are_left_alone() -> None:
    text = f"Mark marked MARK {b'mark'.hex()} {base64.b64encode(b'mark').decode()} {quote('m/rk', safe='')}"
    assert Redaction(["mark", "m/rk"])(text) == text.replace("mark", MASK, 1)


@pytest.mark.parametrize("count", [1, 20, 200])
def test_the_search_for_many_secrets_is_linear(count: int) -> None:
    redact = Redaction([f"{TOKEN}-{number:03}" for number in range(count)])
    for part in (f"{TOKEN}-", base64.b64encode(TOKEN.encode()).decode()[:-2], "a", "6a"):
        text = part * (1_000_000 // len(part))  # a quadratic search would take hours
        assert redact(f"{text} {TOKEN}-000").endswith(f" {MASK}")
        assert redact(f"{TOKEN.upper()}-000 {text}").startswith(f"{MASK} ")


def test_too_many_secrets_mask_the_whole_text() -> None:
    assert Redaction([f"secret-{number}" for number in range(201)])("it was secret-7") == MASK
    assert Redaction(["s" * 300_000])("anything") == MASK


@pytest.mark.parametrize("part", ["input_value=", ", input_type=", "input_value=, input_type", "s3cr3t-t0ken-of-ad"])
def test_redaction_scans_adversarial_text_in_linear_time(part: str) -> None:
    text = part * (1_000_000 // len(part))  # a quadratic scan would take minutes, and hold the interpreter lock
    assert Redaction([TOKEN])(f"{text} {TOKEN}").endswith(MASK)


@pytest.mark.parametrize("split", range(-5, len(TOKEN) * 6, 7))
def test_the_ends_of_a_long_text_contain_no_part_of_a_secret(split: int) -> None:
    redact = Redaction([TOKEN, "t0ke", *(f"{TOKEN}{number}" * 200 for number in range(3))])
    text = "x" * 40 + f"{TOKEN}1" * 200 + "y" * 40
    head = redact.head(text + "z" * 100_000, 40 + split)
    tail = redact.tail("z" * 100_000 + text, 40 + split)
    assert set(head) <= set("x" + MASK)
    assert set(tail) <= set("y" + MASK)
    assert redact.head("z" * 100_000 + text, 50) == redact.tail(text + "z" * 100_000, 50) == "z" * 50


def test_evidence_of_a_long_error_is_searched_at_its_ends_only() -> None:
    scanned: list[int] = []

    class Counting(Redaction):
        def __call__(self, text: str) -> str:
            scanned.append(len(text))
            return super().__call__(text)

    evidence = Evidence.of(ValueError(f"{TOKEN} {'input_value=' * 1_000_000} {TOKEN}"), Counting([TOKEN]))
    assert max(scanned) < 20_000
    assert evidence.message.startswith(MASK)
    assert evidence.message.endswith(MASK)
    assert "characters left out" in evidence.message
    assert TOKEN not in evidence.message + evidence.traceback


def test_secret_paths_are_bounded_and_mask_the_rest() -> None:
    deep: Any = SecretStr(TOKEN)
    for _ in range(40):
        deep = [deep]
    whole, marks = unwrap_secrets({"deep": deep}, TypeAdapter(Any).dump_python({"deep": _masked(deep)}))
    assert [len(mark) for mark in marks] == [30]
    assert TOKEN.encode() not in mask(orjson.dumps(whole), marks)
    many = {f"n{number}": SecretStr(f"{TOKEN}{number}") for number in range(101)}
    whole, marks = unwrap_secrets(many, dict.fromkeys(many, MASK))
    assert marks == EVERYTHING
    assert mask(orjson.dumps(whole), marks) == orjson.dumps(MASK)


def _masked(value: Any) -> Any:
    return [_masked(one) for one in value] if isinstance(value, list) else MASK


@pytest.mark.parametrize("secrets", [[["*"] * 1000], [["a"]] * 1000, 5, [5], {"a": "b"}, [[[]]], ["ab"]])
def test_malformed_secret_paths_are_refused_or_ignored(secrets: Any) -> None:
    env = orjson.dumps({"v": 1, "id": "x", "task": "t", "secrets": secrets})
    data = orjson.dumps({"a": 1})
    for _ in range(500):
        data = b'{"a":%b}' % data
    assert mask(data, read_secret_paths(env))
    assert secret_values(data, read_secret_paths(env)) in ([], ["1"])
    try:
        envelope = Envelope.decode(env)
    except UnreadableEnvelope:
        return
    assert envelope.secrets == ()


def test_inputs_in_pydantic_errors_are_removed() -> None:
    secret = "x1y2" * 40
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python(secret)
    assert "x1y2" in str(caught.value)
    assert "x1y2" not in Redaction([secret])(str(caught.value))


# through Redis


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Collect the log through a loguru handler with full diagnosis."""
    lines: list[str] = []
    handler = loguru_logger.add(lines.append, level="TRACE", diagnose=True, backtrace=True, serialize=True)
    yield lines
    loguru_logger.remove(handler)


@pytest.mark.integration
@pytest.mark.parametrize("keys", [[], [FIRST]], ids=["plain", "sealed"])
@pytest.mark.parametrize("how", ["well", "raises", "fails at length", "validates", "chains", "mismatch"])
async def test_a_secret_reaches_only_the_handler(settings: Settings, log: list[str], keys: list[str], how: str) -> None:
    async with build(with_keys(settings, *keys)) as app:
        task = app.tasks["log_in"]
        account = Account(user="ada", password=SecretStr(TOKEN), key=SecretBytes(TOKEN.encode()))
        handle = await task.enqueue(SecretStr(TOKEN), how, account=account)
        queued = orjson.dumps((await handle.record()).summary()).decode()
        await work_off(app)
        reported = [queued, *log]
        if how in ("well", "mismatch"):
            assert await bounded(handle.result()) == str(len(TOKEN))
        else:
            dead = await letter(app, handle)
            with pytest.raises(TaskFailed) as caught:
                await handle.result()
            reported += [orjson.dumps(dead.summary()).decode(), repr(dead.traceback), str(caught.value)]
            reported += [repr(caught.value.error), repr((await handle.record()).error)]
            assert dead.message
        record = await handle.record()
        reported += [
            orjson.dumps(record.summary()).decode(),
            repr([event.summary() for event in await history(handle)]),
        ]
        assert orjson.loads(orjson.dumps(record.summary()))["args"]["account"]["user"] == "ada"
        assert orjson.loads(orjson.dumps(record.summary()))["args"]["token"] == MASK
        for text in reported:
            assert TOKEN not in text
            assert TOKEN[:7] not in text  # pydantic quotes parts of the input, and a long message is cut
            assert "xs3" not in text
        steps = b"".join((await recorded_steps(app, handle)).values())
        if not keys:
            assert MASK.encode() in steps
        assert TOKEN.encode() not in steps.replace(b'\n"%b"' % TOKEN.encode(), b"")  # the result of a step is stored
        assert (TOKEN.encode() in await everything(app)) is not bool(keys)


@pytest.mark.integration
async def test_errors_of_invalid_arguments_do_not_show_secrets(settings: Settings, log: list[str]) -> None:
    twice = Retry(max_attempts=2, base=0.01)
    async with build(settings.model_copy(update={"unknown_task": twice})) as app:
        with pytest.raises(InvalidArguments) as caught:
            await app.tasks["log_in"].enqueue(SecretStr(TOKEN), TOKEN, account={"user": 7, "password": TOKEN})
        assert TOKEN not in str(caught.value)
        handle = await app.producer.enqueue("log_in", {"token": SecretStr(TOKEN), "how": {"a": TOKEN}}, queue=app.name)
        await work_off(app)
        dead = await letter(app, handle)
        assert dead.reason is Reason.INVALID_ARGUMENTS
        assert TOKEN not in dead.message + dead.traceback + "".join(log)


@pytest.mark.integration
async def test_a_producer_sends_secrets_by_task_name(settings: Settings) -> None:
    async with build(settings) as app:
        args = {"token": SecretStr(TOKEN), "account": {"user": "ada", "password": SecretStr(TOKEN)}}
        handle = await app.producer.enqueue("log_in", args, queue=app.name)
        assert (await handle.record()).summary()["args"] == {
            "token": MASK,
            "account": {
                "user": MASK,
                "password": MASK,
            },  # a plain mapping has no types that mark members as secret
        }
        await work_off(app)
        assert await bounded(handle.result()) == str(len(TOKEN))
        with pytest.raises(TypeError, match="could not encode the arguments as JSON"):
            await app.producer.enqueue("log_in", {"token": object()}, queue=app.name)


@pytest.mark.integration
async def test_an_unmarked_secret_is_masked_in_errors_and_logs(settings: Settings, log: list[str]) -> None:
    async with build(settings) as app:
        account = {"user": "ada", "password": "another-s3cret"}
        handle = await app.producer.enqueue(
            "log_in", {"token": TOKEN, "how": "raises", "account": account}, queue=app.name
        )
        await work_off(app)
        dead = await letter(app, handle)
        assert dead.message == f"cannot log in with '{MASK}'"
        assert TOKEN not in dead.traceback + "".join(log) + repr([event.data for event in await history(handle)])


@pytest.mark.integration
async def test_an_edit_of_arguments_keeps_masked_values(settings: Settings) -> None:
    async with build(with_keys(settings, FIRST)) as app:
        handle = await app.tasks["log_in"].enqueue(SecretStr(TOKEN), "raises")
        await work_off(app)
        shown = orjson.loads((await letter(app, handle)).shown_arguments() or b"")
        edited = orjson.dumps(shown | {"how": "well"})
        assert await replay(app.producer.gateway, await letter(app, handle), Replay(args=edited))
        assert (await handle.record()).summary()["args"]["token"] == MASK
        await work_off(app)
        assert await bounded(handle.result()) == str(len(TOKEN))


@pytest.mark.integration
async def test_a_recorded_step_returns_its_secret(settings: Settings) -> None:
    async with App("kept", settings=with_keys(settings, FIRST)) as app:
        calls: list[str] = []

        async def fetch() -> Account:
            calls.append("fetch")
            return Account(user="ada", password=SecretStr(TOKEN))

        @app.task(retry=Retry(max_attempts=2, base=0.0))
        async def use(ctx: Context) -> int:
            account = await ctx.step("fetch", fetch)
            if ctx.attempt == 1:
                raise ValueError("once")
            return len(account.password.get_secret_value())

        handle = await use.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == len(TOKEN)
        assert calls == ["fetch"]


@pytest.mark.integration
async def test_the_plain_text_warning_is_logged_once_and_names_the_tasks(settings: Settings, log: list[str]) -> None:
    app = build(settings)
    for _ in range(2):
        async with app, Worker(app):
            pass
    (warning,) = [line for line in log if "stored in plain text" in line]
    assert "secret arguments of log_in are stored in plain text in Redis" in warning
    log.clear()
    async with build(with_keys(settings, FIRST)):
        assert not [line for line in log if "stored in plain text" in line]


def test_tracebacks_in_the_log_show_no_values(log: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def fails(token: str) -> None:
        raise ValueError("it failed")

    try:
        fails(TOKEN)
    except ValueError:
        logger.exception("seen")
        loguru_logger.exception("shown by loguru itself")
    ours, theirs = [line for line in log if "seen" in line], [line for line in log if "by loguru" in line]
    assert "ValueError: it failed" in ours[0]
    assert "in fails" in ours[0]
    assert TOKEN not in ours[0]
    assert TOKEN in theirs[0]  # the log handler shows values of other loggers


def test_an_envelope_with_secrets_is_readable_without_secret_paths() -> None:
    app = build()
    arguments, secrets = app.tasks["log_in"].arguments.encode_call((SecretStr(TOKEN),), {})
    message = app.tasks["log_in"].template.message(arguments, secrets)
    envelope = Envelope.decode(message.envelope)
    assert envelope.secrets == (("token",),)
    assert not envelope.plain
    assert Envelope.decode(envelope.encode()) == envelope
    known = {name: value for name, value in orjson.loads(message.envelope).items() if name != "secrets"}
    assert Envelope.decode(orjson.dumps(known)).id == envelope.id


# marks that were removed


def _without_marks(envelope: bytes) -> bytes:
    known = orjson.loads(envelope)
    assert known.pop("secrets")
    return orjson.dumps(known)


@pytest.mark.integration
@pytest.mark.parametrize("size", [10, 2_000_000], ids=["small", "in chunks"])
async def test_marks_that_were_removed_from_a_sealed_task_show_nothing(settings: Settings, size: int) -> None:
    async with build(with_keys(settings, FIRST)) as app:
        task = app.tasks["log_in"]
        handle = await task.options(delay=3600).enqueue(SecretStr(TOKEN), "w" * size)
        key = handle.partition.record(handle.id)
        stored, args = await redis_command(app, "HMGET", key, "env", "args")
        await redis_command(app, "HSET", key, "env", _without_marks(stored))
        shown = orjson.dumps((await handle.record()).summary()).decode()
        assert TOKEN not in shown
        with pytest.raises(DecryptionError):
            await fork(app.producer, handle.id)
        forged = (b"env", _without_marks(stored), b"args", args)
        died = (b"reason", b"failed", b"evidence", b"{}", b"attempts", b"1", b"crashes", b"0", b"worker", b"w")
        place = (b"id", handle.id.encode(), b"task", b"log_in", *forged, *died)
        await redis_command(app, "XADD", handle.partition.dead, "*", *place)
        (dead,) = [found async for found in list_letters(app.producer.gateway, [handle.partition], Filter())]
        assert TOKEN not in orjson.dumps(dead.summary()).decode()
        await redis_command(app, "DEL", handle.partition.dead)
        await redis_command(app, "HDEL", key, "env")  # then the record names the task alone
        await redis_command(app, "HSET", key, "task", "log_in")
        assert TOKEN not in orjson.dumps((await handle.record()).summary()).decode()
        # a name that looks like marks and a shorter name
        marks = orjson.dumps(orjson.loads(stored)["secrets"]).decode()
        for name in (f"{marks}log_in", f"log_in\0{marks}"):
            forgery = orjson.dumps({"v": 1, "id": handle.id, "task": name})
            await redis_command(app, "HSET", key, "env", forgery)
            assert TOKEN not in orjson.dumps((await handle.record()).summary()).decode()
        await redis_command(app, "HSET", key, "env", stored)
        if size < 1000:
            assert orjson.loads((await handle.record()).shown_arguments() or b"")["token"] == MASK


@pytest.mark.integration
async def test_a_task_whose_marks_were_removed_does_not_run(settings: Settings) -> None:
    async with build(with_keys(settings, FIRST)) as app:
        handle = await app.tasks["log_in"].options(delay=3600).enqueue(SecretStr(TOKEN))
        key = handle.partition.record(handle.id)
        stored = await redis_command(app, "HGET", key, "env")
        await redis_command(app, "HSET", key, "env", _without_marks(stored))
        await redis_command(app, "ZADD", handle.partition.due, 1, handle.id)
        await work_off(app)
        assert (await letter(app, handle)).reason is Reason.UNDECRYPTABLE


@pytest.mark.integration
async def test_without_a_key_the_types_of_the_task_mask_what_lost_its_marks(settings: Settings, log: list[str]) -> None:
    async with build(settings) as app:
        account = Account(user="ada", password=SecretStr("another-s3cret"))
        task = app.tasks["log_in"]
        handle = await task.options(delay=3600).enqueue(SecretStr(TOKEN), "raises", account=account)
        key = handle.partition.record(handle.id)
        known = orjson.loads(await redis_command(app, "HGET", key, "env"))
        known["secrets"] = [path for path in known["secrets"] if path != ["token"]]
        assert known["secrets"]
        await redis_command(app, "HSET", key, "env", orjson.dumps(known))
        await redis_command(app, "ZADD", handle.partition.due, 1, handle.id)
        await work_off(app)
        dead = await letter(app, handle)
        assert dead.message == f"cannot log in with '{MASK}'"
        assert TOKEN not in dead.traceback + "".join(log) + repr([event.data for event in await history(handle)])


@pytest.mark.integration
@pytest.mark.parametrize("inputs", ["own", "of the first", "plain"])
async def test_the_marks_of_the_inputs_of_a_session_cannot_be_removed(settings: Settings, inputs: str) -> None:
    async with build(with_keys(settings, FIRST, required=True)) as app:
        gateway, namespace = app.producer.gateway, app.producer.namespace
        send = partial(send_to_session, gateway, namespace, "log_in", "ada", queue=app.name)
        given = (orjson.dumps({"token": TOKEN}), (("token",),))
        turns = [await send("one", inputs=given), await send("two", inputs=given), await send("three")]
        address = SessionAddress.of(namespace, "log_in", "ada")
        assert await redis_command(app, "HEXISTS", address.session, "secrets") == 0
        if inputs != "own":
            first = await redis_command(app, "HGET", address.session, "i:1")
            other = first if inputs == "of the first" else orjson.dumps([{"token": TOKEN}, []])
            await redis_command(app, "HSET", address.session, "i:2", other)
        for turn in turns[: 2 if inputs == "own" else 1]:
            assert await end_turn(gateway, address, turn, SessionTurnEnd("answered", b"1", b"{}"))
        assert await redis_command(app, "HEXISTS", address.session, "i:1") == 0
        envelopes = [await redis_command(app, "HGET", partition_of(app).record(str(turn)), "env") for turn in turns]
        marks = [None if one is None else orjson.loads(one).get("secrets") for one in envelopes]
        if inputs == "own":
            assert marks == [[["token"]]] * 3
        else:
            assert marks == [[["token"]], None, None], "the third turn has not those of the first"
            assert b"refused" in repr(await redis_command(app, "XRANGE", address.history, "-", "+")).encode()


# the command line


@pytest.fixture
def shell(settings: Settings, tmp_path: Path, environment: None) -> Settings:
    return settings


async def answer(*args: str) -> Answer:
    return await asyncio.to_thread(call, *args)


@pytest.mark.integration
@pytest.mark.parametrize("keys", ["", FIRST], ids=["plain", "sealed"])
async def test_the_command_line_shows_all_but_secrets(
    shell: Settings, monkeypatch: pytest.MonkeyPatch, keys: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("PERDURE_ENCRYPTION_KEYS", keys)
    async with build(with_keys(shell, *filter(None, [keys]))) as app:
        args = orjson.dumps({"token": TOKEN, "how": "raises"}).decode()
        (task_id,) = (await answer("enqueue", "log_in", "--queue", "secrets", "--args", args, "--secret", "token")).ids
        listed = [await answer("task", "show", task_id), await answer("task", "list", "--json")]
        await work_off(app)
        exported = tmp_path / "letters"
        commands: list[tuple[str, ...]] = [
            *[("task", "show", task_id), ("task", "show", task_id, "--json"), ("task", "events", task_id)],
            *[("task", "result", task_id, "--json"), ("task", "events", task_id, "--json")],
            *[("dlq", "list"), ("dlq", "list", "--json"), ("dlq", "show", task_id), ("dlq", "show", task_id, "--json")],
            *[("dlq", "export"), ("dlq", "export", "-o", str(exported)), ("worker", "list", "--json")],
        ]
        listed += [await answer(*command) for command in commands]
        for one in listed:
            assert TOKEN not in one.out + one.err
        assert TOKEN not in exported.read_text()
        assert orjson.loads(exported.read_text())["args"] == {"token": MASK, "how": "raises"}
        assert f"cannot log in with '{MASK}'" in listed[2].out
        edited = orjson.dumps({"token": MASK, "how": "well"}).decode()
        assert (await answer("dlq", "replay", task_id, "--edit-args", edited)).code == 0
        await work_off(app)
        assert (await answer("task", "result", task_id)).out.strip() == f'"{len(TOKEN)}"'


@pytest.mark.integration
async def test_the_definition_of_a_task_masks_what_has_no_marks(shell: Settings, tmp_path: Path) -> None:
    async with build(shell) as app:
        await work_off(app)  # publishes the definitions
        given = {"token": TOKEN, "how": "raises", "account": {"user": "ada", "password": TOKEN, "spare": [TOKEN]}}
        handle = await app.producer.enqueue("log_in", given, queue=app.name)
        listed = [await answer("task", "show", handle.id), await answer("task", "show", handle.id, "--json")]
        listed.append(await answer("task", "list", "--json"))
        assert listed[1].json["args"]["account"] == {"user": "ada", "password": MASK, "spare": [MASK]}
        await work_off(app)
        commands: list[tuple[str, ...]] = [
            *[("task", "show", handle.id), ("task", "handoff", handle.id), ("dlq", "list", "--json")],
            *[("dlq", "show", handle.id), ("dlq", "show", handle.id, "--json"), ("dlq", "export")],
            *[("dlq", "replay", handle.id, "--dry-run", "--json"), ("top", "--json")],
        ]
        listed += [await answer(*command) for command in commands]
        for printed in listed:
            assert TOKEN not in printed.out + printed.err
        edited = orjson.dumps(listed[1].json["args"] | {"how": "well"}).decode()
        assert (await answer("dlq", "replay", handle.id, "--edit-args", edited)).code == 0
        await work_off(app)
        assert (await answer("task", "result", handle.id)).out.strip() == f'"{len(TOKEN)}"'


def test_the_paths_of_a_schema_are_those_of_the_values() -> None:
    schema = App("schemas").task(_everything).arguments.schema()
    assert schema is not None
    assert set(schema_secrets(schema)) == {
        *{("it", name) for name in ("one", "renamed", "chosen")},
        *{("it", "mapping", "*"), ("it", "accounts", "*", "password"), ("it", "accounts", "*", "spare", "*")},
        *{("it", "accounts", "*", "key"), ("it", "box", "inside"), ("it", "tokens", "*"), ("it", "pair", "*")},
        ("it", "nothing"),
    }


async def _everything(ctx: Context, it: Everything) -> None:
    pass


@pytest.mark.parametrize("schema", [None, [], "x", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}])
def test_a_schema_that_is_no_schema_marks_nothing(schema: Any) -> None:
    assert schema_secrets(schema) == ()
    looped = {
        "$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}, "c": {"writeOnly": True}}}},
        "$ref": "#/$defs/a",
    }
    assert ("c",) in schema_secrets(looped)
    assert ("b", "c") in schema_secrets(looped)
    assert schema_secrets({"properties": {"a": {"$ref": "file:///etc/passwd"}}}) == ()


@pytest.mark.integration
async def test_the_command_line_reports_a_missing_key(shell: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async with build(with_keys(shell, FIRST)) as app:
        handle = await app.tasks["log_in"].enqueue(SecretStr(TOKEN))
        failed = await app.tasks["log_in"].enqueue(SecretStr(TOKEN), "raises")
        await work_off(app)
        result = await answer("task", "result", handle.id)
        assert (result.code, result.out) == (1, "")
        assert ": encrypted with key" in result.err
        assert "Traceback" not in result.err
        shown = await answer("task", "show", handle.id)
        assert shown.code == 0
        assert "could not decrypt" in shown.out
        for command in (("dlq", "show", failed.id), ("dlq", "export"), ("task", "events", failed.id), ("dlq", "list")):
            found = await answer(*command)
            assert found.code == 0
            assert "KeyMissing" in found.out
        refused = await answer("dlq", "replay", failed.id, "--edit-args", '{"token": "new"}')
        assert refused.code == 1
        assert ": encrypted with key" in refused.err
        monkeypatch.setenv("PERDURE_ENCRYPTION_KEYS", "nonsense")
        wrong = await answer("task", "list")
        assert wrong.code == 2
        assert "PERDURE_ENCRYPTION_KEYS: key 1 must be 32 bytes in base64" in wrong.err


def test_keys_are_generated_and_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    printed = call("keys", "generate")
    monkeypatch.setenv("PERDURE_ENCRYPTION_KEYS", printed.out.strip())
    (known,) = call("keys", "list").ids
    assert call("keys", "list", "--json").json == {
        "keys": [known],
        "required": False,
        "approvers": [],
        "signs_as": None,
    }
    assert printed.out.strip() not in call("keys", "list").out
    file = tmp_path / "keys"
    assert call("keys", "generate", "-o", str(file)).code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert call("keys", "generate", "-o", str(file)).code == 1
    monkeypatch.delenv("PERDURE_ENCRYPTION_KEYS")
    assert "no key is set" in call("keys", "list").err
    monkeypatch.setenv("PERDURE_ENCRYPTION_KEY_FILE", str(file))
    assert len(call("keys", "list").ids) == 1
    file.chmod(0o644)
    refused = call("keys", "list")
    assert (refused.code, "chmod 600" in refused.err) == (2, True)
