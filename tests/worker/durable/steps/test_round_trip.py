"""Values of steps, arguments and results: every run sees what the stored JSON is read back as."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, StrEnum
from pathlib import Path
from threading import Lock
from typing import Any, Literal
from zoneinfo import ZoneInfo

import pytest
from perdure import App, Context, InvalidArguments, ResumeWarning, Retry, SyncContext
from perdure.deadletter.replay import Replay, replay
from perdure.worker.durable.steps.codec import Codec, codec_of
from perdure.worker.errors import ResultMismatch, StepDefinitionError, TaskDefinitionError, UnserialisableResult
from pydantic import AliasChoices, AliasPath, Base64Bytes, BaseModel, ConfigDict, Field, PrivateAttr, computed_field
from pydantic.alias_generators import to_camel

from tests.support.workers import bounded, letter, recorded_steps, work_off

pytestmark = pytest.mark.integration

AGAIN = Retry(max_attempts=2, base=0.001)


class Kind(Enum):
    A = "a"


class Level(StrEnum):
    LOW = "low"


class Base(BaseModel):
    role: str = "user"


class Derived(Base):
    extra: int = 7


class Cat(BaseModel):
    name: str


class Dog(BaseModel):
    name: str


class Holder(BaseModel):
    pets: list[Cat | Dog]
    base: Base | None = None


class Ordered(BaseModel):
    order_id: int = Field(alias="orderId")


class Camel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)
    unit_price: Decimal
    inner: list[Ordered] = []


class Validated(BaseModel):
    first: int = Field(validation_alias="FIRST")
    second: int = Field(validation_alias=AliasPath("second", 0), serialization_alias="zwei")
    third: int = Field(validation_alias=AliasChoices("c", "C"))


class Computed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def area(self) -> int:
        return self.width**2


class Excluded(BaseModel):
    token: int = Field(exclude=True)


class WithPrivate(BaseModel):
    text: str
    _request_id: str = PrivateAttr("none")


class Loss(BaseModel):
    loss: float
    note: str | None = None


class WithLock(BaseModel):
    text: str = ""
    _lock: Any = PrivateAttr(default_factory=Lock)
    _log: Any = PrivateAttr(default_factory=object)


@dataclass
class Totals:
    numbers: list[int]
    total: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.total = 0


def with_private() -> WithPrivate:
    made = WithPrivate(text="hello")
    made._request_id = "req-1"
    return made


def with_total() -> Totals:
    made = Totals([4, 5])
    made.total = 9
    return made


ORDERED = Ordered(orderId=7)
CAMEL = Camel.model_validate({"unitPrice": "1.10", "inner": [{"orderId": 7}]})
VALIDATED = Validated.model_validate({"FIRST": 1, "second": [2], "C": 3})
OSLO = datetime(2026, 3, 28, 12, tzinfo=ZoneInfo("Europe/Oslo"))

REPLACED: list[tuple[Any, Any, Any]] = [
    (dict[str, Any], {"price": Decimal("1.10"), "size": (2, 3)}, {"price": "1.10", "size": [2, 3]}),
    (dict[str, Any], {"kind": Kind.A, "ids": {1}, "at": datetime(2026, 1, 1, tzinfo=UTC)}, None),
    (list, (1, Decimal(2)), [1, "2"]),
    (object, {1: "x"}, {"1": "x"}),
    (dict[str | None, int], {None: 1}, {"None": 1}),
    (Sequence[int], (1, 2), [1, 2]),
    (deque[int], deque([1, 2], maxlen=2), deque([1, 2])),
    (list[Any], [math.nan, math.inf], ["NaN", "Infinity"]),
    (datetime, OSLO, OSLO),
    (Ordered, ORDERED, ORDERED),
    (list[Camel], [CAMEL], [CAMEL]),
    (Validated, VALIDATED, VALIDATED),
    (Computed, Computed(width=3), Computed(width=3)),
    (bytes | None, b"\xff\x00", b"\xff\x00"),
    (list[bytes], [b"\xff", b"text"], [b"\xff", b"text"]),
    (dict[str, bytes], {"a": b"\xfe"}, {"a": b"\xfe"}),
    (str, "half \ud83d of it", "half \ufffd of it"),
    (list[Base], [Base(role="\udfff")], [Base(role="\ufffd")]),
    (Any, {"text": ["\ud83d"]}, {"text": ["\ufffd"]}),
    (Cat | Dog, Cat(name="Tom"), Cat(name="Tom")),
    (int | float, 3.0, 3.0),
    (Level | str, Level.LOW, "low"),
    (str | Level | None, Level.LOW, "low"),
    (dict[str, bool | int | str], {"level": Level.LOW}, {"level": "low"}),
    (Base64Bytes, b"YQ==", b"a"),
    (list[Base64Bytes] | None, [b"YQ=="], [b"a"]),
    (Decimal, Decimal("0.10"), Decimal("0.10")),
]


@pytest.mark.parametrize(("declared", "value", "expected"), REPLACED, ids=lambda part: repr(part)[:40])
def test_a_result_is_what_its_json_is_read_back_as(declared: Any, value: Any, expected: Any) -> None:
    codec = Codec(declared, secrets=True)
    data, first = codec.encode("step", "one", value)
    again = codec.decode_record("one", data)
    assert repr(first) == repr(again)
    if expected is not None:
        assert first == expected
        assert type(first) is type(expected)
    if declared is datetime:
        assert first.tzinfo.__class__ is again.tzinfo.__class__


def test_nan_stays_a_number_where_a_float_is_declared() -> None:
    for declared, value in [(float, math.nan), (list[float], [math.nan]), (Loss, Loss(loss=math.nan))]:
        codec = Codec(declared)
        data, first = codec.encode("step", "one", value)
        assert "nan" in repr(first) and "nan" in repr(codec.decode_record("one", data))
    data, first = Codec(Loss).encode("step", "one", Loss(loss=-math.inf))
    assert first == Codec(Loss).decode(data) == Loss(loss=-math.inf)


def test_a_result_of_a_closed_type_stays_the_same_object() -> None:
    text, numbers = "some text", {"one": [1, 2]}
    assert codec_of(lambda: text).encode("step", "one", text)[1] is text
    codec = Codec(dict[str, list[int]])
    data, checked = codec.write("step", "one", numbers)
    assert codec.read_back("step", "one", data, checked)[1] is checked


LOSSES = [
    (Base, Derived(), "Derived is read as Base, without extra"),
    (WithPrivate, with_private(), "WithPrivate is read as WithPrivate, without _request_id"),
    (list[Totals], [with_total()], "Totals is read as Totals, without total"),
    (Holder, Holder(pets=[Cat(name="Tom")], base=Derived()), "Derived is read as Base, without extra"),
]


@pytest.mark.parametrize(("declared", "value", "text"), LOSSES, ids=lambda part: repr(part)[:40])
def test_what_a_result_lacks_warns_once(declared: Any, value: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.worker.resume_warning._given", set())
    codec = Codec(declared)
    with pytest.raises(ResumeWarning, match=text):
        codec.encode("step", "one", value)
    with pytest.warns(ResumeWarning, match=text):
        first = codec.encode("step", "one", value)[1]
    data, second = codec.encode("step", "one", value)
    assert first == second == codec.decode_record("one", data)


async def test_fields_that_a_dataclass_computes_are_computed_where_it_is_read(app: App) -> None:
    seen: list[Any] = []

    @app.task
    async def add(ctx: Context, totals: Totals, more: list[Totals]) -> Totals:
        seen.extend((totals, *more))
        return totals

    handle = await add.enqueue(Totals([4, 5]), [Totals([])])
    await work_off(app)
    assert await bounded(handle.result()) == Totals([4, 5])
    assert seen == [Totals([4, 5]), Totals([])]


def test_locks_and_other_objects_without_a_value_are_no_loss() -> None:
    codec = Codec(WithLock)
    assert codec.encode("step", "one", WithLock(text="text"))[1].text == "text"


MISREAD: list[tuple[Any, Any, str]] = [
    (Cat | Dog, Dog(name="Rex"), "Dog, whose JSON is read back as Cat"),
    (Holder, Holder(pets=[Cat(name="Tom"), Dog(name="Rex")]), r".pets\[1\] is Dog, whose JSON is read back as Cat"),
    (date | str, "2026-01-01", "str, whose JSON is read back as date"),
    (float | str, math.nan, "float, whose JSON is read back as str"),
    (bytes | str, b"x", "bytes, whose JSON is read back as str"),
    (Kind | str, Kind.A, "Kind, whose JSON is read back as str"),
]


@pytest.mark.parametrize(("declared", "value", "text"), MISREAD, ids=lambda part: repr(part)[:40])
def test_another_member_of_a_union_is_refused(declared: Any, value: Any, text: str) -> None:
    with pytest.raises(UnserialisableResult, match=text):
        Codec(declared).encode("step", "one", value)


def some_list() -> Iterable[int]:
    return [1, 2, 3]


def generated() -> Generator[int, None, None]:
    yield from (1, 2, 3)


def iterated() -> Iterator[int]:
    return iter([1, 2, 3])


async def generated_async() -> AsyncIterator[int]:
    for number in (1, 2, 3):
        yield number


def generated_untyped():  # type: ignore[no-untyped-def]
    yield from (1, 2, 3)


@pytest.mark.parametrize("fn", [some_list, generated, iterated, generated_async, generated_untyped])
async def test_iterators_become_lists(app: App, fn: Callable[[], Any]) -> None:
    seen: list[Any] = []

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> Iterable[int]:
        numbers = await ctx.step("numbers", fn)
        seen.append(numbers)
        assert sum(numbers) == 6
        if ctx.attempt == 1:
            raise ConnectionError
        return (number for number in numbers)

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == [1, 2, 3]
    assert seen == [[1, 2, 3]] * 2


def quote() -> dict[str, Any]:
    return {"price": Decimal("1.10"), "size": (2, 3), "kind": Kind.A}


QUOTED = {"price": "1.10", "size": [2, 3], "kind": "a"}


async def test_every_kind_of_step_returns_what_a_resumed_run_sees(app: App) -> None:
    seen: list[list[Any]] = []

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> None:
        async def outer() -> list[Any]:
            return [await ctx.step("inner", quote)]

        values = [
            await ctx.step("plain", quote),
            await ctx.tool("tool", quote),
            await ctx.options(step_id="a").step("named", quote),
            await ctx.options(durability="async").step("async", quote),
            *await ctx.options(nested="record").step("outer", outer),
        ]
        seen.append(values)
        if ctx.attempt == 1:
            raise ConnectionError

    @app.task(retry=AGAIN)
    def blocking(ctx: SyncContext) -> None:
        seen.append([ctx.step("plain", quote)])
        if ctx.attempt == 1:
            raise ConnectionError

    for task in (job, blocking):
        await task.enqueue()
        await work_off(app)
    assert seen == [[QUOTED] * 5, [QUOTED] * 5, [QUOTED], [QUOTED]]


@pytest.mark.parametrize(
    "value", [ORDERED, CAMEL, VALIDATED, Computed(width=3)], ids=lambda value: type(value).__name__
)
async def test_ordinary_models_are_arguments_results_and_steps(app: App, value: BaseModel) -> None:
    kind = type(value)

    def same() -> Any:
        return value

    same.__annotations__["return"] = kind

    async def job(ctx: Context, given: Any) -> Any:
        assert given == value
        found = await ctx.step("same", same)
        if ctx.attempt == 1:
            raise ConnectionError
        return found

    job.__annotations__.update({"given": kind, "return": kind})
    task: Any = app.task(retry=AGAIN)(job)
    handle = await task.enqueue(value)
    await work_off(app)
    assert await bounded(handle.result()) == value


async def test_a_result_of_another_member_is_kept_until_the_type_is_corrected(app: App) -> None:
    calls: list[str] = []
    caught: list[str] = []

    def adopt() -> Cat | Dog:
        calls.append("paid")
        return Dog(name="Rex")

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> str:
        try:
            return type(await ctx.step("adopt", adopt)).__name__
        except ResultMismatch as error:
            caught.append(str(error))
            raise

    handle = await job.enqueue()
    await work_off(app)
    assert "Dog, whose JSON is read back as Cat" in (await letter(app, handle)).message
    assert await replay(app.producer.gateway, await letter(app, handle), Replay())
    await work_off(app)
    assert calls == ["paid"]
    assert len(set(caught)) == 1 and len(caught) == 2
    adopt.__annotations__["return"] = "Dog | Cat"
    assert await replay(app.producer.gateway, await letter(app, handle), Replay())
    await work_off(app)
    assert await bounded(handle.result()) == "Dog"
    assert calls == ["paid"]


async def test_a_result_that_cannot_be_read_back_is_kept(app: App) -> None:
    calls: list[str] = []

    def digits() -> Any:
        calls.append("paid")
        return {"digits": 10**5_000}

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> None:
        await ctx.step("digits", digits)

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert found.error.endswith("ResultMismatch")
    assert found.attempts == 1
    assert "d:digits" in await recorded_steps(app, handle)
    assert await replay(app.producer.gateway, await letter(app, handle), Replay())
    await work_off(app)
    assert calls == ["paid"]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [190, 201, 254, 300, 2_000])
async def test_what_is_nested_deeply_stays_data_or_becomes_text_at_depth(app: App, depth: int) -> None:
    seen: list[Any] = []

    def deep() -> dict[str, Any]:
        return {"value": nested(depth)}

    @app.task(retry=AGAIN)
    async def job(ctx: Context, given: dict[str, Any]) -> None:
        seen.append((await ctx.step("deep", deep), given))
        if ctx.attempt == 1:
            raise ConnectionError

    handle = await job.enqueue(deep())
    await work_off(app)
    await bounded(handle.result())
    first, second = seen
    assert first == second
    assert [value == deep() for value in first] == [depth == 190] * 2


async def test_arguments_that_cannot_be_read_back_are_refused_at_once(app: App) -> None:
    @app.task
    async def anything(ctx: Context, value: Any) -> None: ...

    @app.task
    async def pet(ctx: Context, value: Cat | Dog) -> None: ...

    with pytest.raises(InvalidArguments, match="cannot be read back"):
        await anything.enqueue(10**5_000)
    with pytest.raises(InvalidArguments, match=r": value is Dog, whose JSON is read back as Cat;"):
        await pet.enqueue(Dog(name="Rex"))
    await pet.enqueue(Cat(name="Tom"))


async def test_an_argument_of_a_union_of_plain_types_is_what_its_json_says(app: App) -> None:
    seen: list[Any] = []

    @app.task
    async def read(ctx: Context, path: str | Path, at: date | str) -> None:
        seen.append((path, at))

    await read.enqueue(Path("a/b"), "2026-01-01")
    await work_off(app)
    assert seen == [("a/b", date(2026, 1, 1))]


async def test_arguments_follow_the_rule_of_results(app: App) -> None:
    seen: list[Any] = []

    @app.task
    async def train(ctx: Context, options: dict[str, Any], loss: float, at: Loss) -> None:
        seen.append((options, loss, at))

    await train.enqueue({"loss": math.nan, "text": "\ud83d"}, math.inf, Loss(loss=-math.inf))
    await work_off(app)
    assert seen == [({"loss": "NaN", "text": "\ufffd"}, math.inf, Loss(loss=-math.inf))]


async def test_types_that_no_value_survives_are_refused_when_they_are_declared(app: App) -> None:
    async def excluded(ctx: Context, given: Excluded) -> None: ...

    async def pairs(ctx: Context) -> dict[tuple[int, int], int]:
        raise AssertionError

    for handler, text in [
        (excluded, "parameter 'given': field 'token' of Excluded is excluded"),
        (pairs, "a key of a JSON object is text, and not a tuple"),
    ]:
        with pytest.raises(TaskDefinitionError, match=text):
            app.task(handler)  # type: ignore[call-overload]

    calls: list[str] = []

    def pay() -> dict[tuple[int, int], int]:
        calls.append("paid")
        return {(1, 2): 3}

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("pay", pay)

    handle = await job.enqueue()
    await work_off(app)
    assert (await letter(app, handle)).error.endswith(StepDefinitionError.__name__)
    assert not calls


def test_a_literal_is_no_union() -> None:
    assert Codec(Literal["a", "b"]).encode("step", "one", "a") == (b'"a"', "a")
