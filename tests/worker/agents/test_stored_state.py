"""The state of an agent after each step is what a later run reads, and what cannot be read is refused."""

from __future__ import annotations

import collections
import enum
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, ResumeWarning, Retry
from perdure.deadletter.policy import Reason
from perdure.worker.agents.journal.history import check_state, state_at
from perdure.worker.agents.state_type import StateType
from perdure.worker.errors import StateError, TaskDefinitionError
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    computed_field,
    create_model,
    field_validator,
)
from pydantic.alias_generators import to_camel

from tests.support.workers import bounded, letter, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("stored", check_state=True, lease=30.0)]

OSLO = datetime(2026, 3, 28, 12, tzinfo=ZoneInfo("Europe/Oslo"))
NAN, INF = float("nan"), float("inf")
HALF = "a\ud83d"


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = {"a": found}
    return found


class Kind(enum.Enum):
    A = "a"


class Camel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)

    order_id: int


class Aliased(BaseModel):
    order_id: int = Field(alias="orderId")


class Validated(BaseModel):
    order_id: int = Field(validation_alias=AliasChoices("oid", "order"))


class Serialised(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True)

    order_id: int = Field(serialization_alias="oid")


class Square(BaseModel):
    model_config = ConfigDict(extra="forbid")

    width: int

    @computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def area(self) -> int:
        return self.width**2


class Measured(BaseModel):
    """Its own configuration makes NaN null."""

    value: float | None
    more: Any = None


@dataclass
class Point:
    x: float
    seen: Any = None


class Cat(BaseModel):
    name: str


class Dog(BaseModel):
    name: str


def state_with(kind: Any, default: Any = None) -> type[AgentState]:
    """Return a state class with a field of a type."""
    return create_model("Holding", __base__=AgentState, held=(kind, default))


def remembering(kind: type[AgentState], value: Any) -> type[Agent[Any]]:
    """Return an agent that sets a field in its first step, and notes it in the second, which fails once."""

    class Remembering(Agent[Any]):
        state_type: ClassVar[type[AgentState]] = kind
        snapshot_every: ClassVar[int] = 2
        seen: ClassVar[list[Any]] = []

        async def plan(self, ctx: Context, state: Any) -> list[PlanStep]:
            return [PlanStep(key=key, title=key) for key in ("set", "look")]

        async def act(self, ctx: Context, state: Any, step: PlanStep) -> None:
            if step.key == "set":
                state.held = value
                return
            self.seen.append(state.held)
            if len(self.seen) == 1:
                raise ConnectionError("cut off")

        async def finish(self, ctx: Context, state: Any) -> str:
            return "done"

    return Remembering


class Mixed(str, enum.Enum):  # noqa: UP042 - its text is not its value
    LOW = "low"


VALUES: list[tuple[Any, Any, Any]] = [
    (
        dict[str, Any],
        {"p": Decimal("1.10"), "t": (1, 2), "e": Kind.A, "s": {1}},
        {"p": "1.10", "t": [1, 2], "e": "a", "s": [1]},
    ),
    (Any, {1: "one", None: 2}, {"1": "one", "None": 2}),
    (list, [(1, 2), date(2026, 1, 1)], [[1, 2], "2026-01-01"]),
    (dict[str, Any], {"n": [NAN, INF, -INF]}, {"n": ["NaN", "Infinity", "-Infinity"]}),
    (float, -INF, -INF),
    (float, 3, 3.0),
    (list[float], [1, 2.5], [1.0, 2.5]),
    (dict[str, float], {"cost": 0}, {"cost": 0.0}),
    (int, True, 1),
    (str, Mixed.LOW, "low"),
    (dict[str, int], collections.Counter("aab"), {"a": 2, "b": 1}),
    (list[float], [1.5, INF], [1.5, INF]),
    (Measured | None, Measured(value=NAN, more={"i": INF}), None),
    (Point | None, Point(NAN, seen=(INF,)), None),
    (datetime, OSLO, None),
    (bytes | str, "x", b"x"),
    (Cat | Dog, Dog(name="rex"), Cat(name="rex")),
    (collections.Counter[str], collections.Counter("aab"), collections.Counter("aab")),
    (Camel, Camel.model_validate({"orderId": 1}), Camel.model_validate({"orderId": 1})),
    (list[Aliased], [Aliased(orderId=1)], [Aliased(orderId=1)]),
    (Validated, Validated.model_validate({"oid": 1}), Validated.model_validate({"oid": 1})),
    (Serialised, Serialised(order_id=1), Serialised(order_id=1)),
    (dict[str, Square], {"a": Square(width=2)}, {"a": Square(width=2)}),
    (str, HALF, "a\ufffd"),
    (dict[str, Any], {HALF: [Cat(name=HALF)]}, {"a\ufffd": [{"name": "a\ufffd"}]}),
    (int, 2**64 - 1, 2**64 - 1),
    (dict[str, Any], nested(230), nested(230)),
    (dict[str, Any], nested(400), None),
]


@pytest.mark.filterwarnings("default::perdure.ResumeWarning")
@pytest.mark.parametrize(("kind", "value", "expected"), VALUES)
async def test_the_next_step_sees_what_a_resumed_run_reads(app: App, kind: Any, value: Any, expected: Any) -> None:
    agent: Any = remembering(state_with(kind | None), value)
    handle = await app.agent(agent, name="remember", retry=Retry(max_attempts=2, base=0.0)).enqueue("x")
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    first, resumed = agent.seen
    assert repr(first) == repr(resumed)
    assert type(first) is type(resumed)
    if expected is not None:
        assert first == expected
    assert await check_state(app.producer.gateway, handle.partition, handle.id) is not None


class Cart(AgentState):
    facts: dict[str, Any] = Field(default_factory=dict)
    pairs: list[Any] = Field(default_factory=list)
    words: list[str] = Field(default_factory=list)


async def test_lists_and_dicts_are_changed_in_place_and_only_changed_fields_are(app: App) -> None:
    held: list[bool] = []

    class Shop(Agent[Cart]):
        async def plan(self, ctx: Context, state: Cart) -> list[PlanStep]:
            state.facts, state.pairs = {"inner": {"price": Decimal("1.10")}, "list": [(1, 2)]}, [(3, 4)]
            self.inner, self.facts, self.words = state.facts["inner"], state.facts, state.words
            self.items, self.pairs = state.facts["list"], state.pairs
            return [PlanStep(key=key, title=key, arguments={"at": (1, 2)}) for key in ("one", "two")]

        async def act(self, ctx: Context, state: Cart, step: PlanStep) -> None:
            assert state.facts == {"inner": {"price": "1.10"}, "list": [[1, 2]]}
            held.append(state.facts is self.facts and state.facts["inner"] is self.inner)
            held.append(state.facts["list"] is self.items and state.pairs is self.pairs and state.words is self.words)
            assert step.arguments == {"at": [1, 2]}
            step.arguments["at"] = (5, 6)
            step.progress["done"] = 1
            mine = next(one for one in state.plan if one.key == step.key)
            assert mine is step
            if step.key == "two":
                assert state.plan[0].arguments == {"at": [5, 6]}

        async def finish(self, ctx: Context, state: Cart) -> str:
            return "done"

    handle = await app.agent(Shop, name="shop").enqueue("x")
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    assert held == [True] * 4


async def test_a_difference_without_a_change_of_the_json_is_noticed(app: App) -> None:
    """Only fields whose JSON changed are read again."""

    class Twice(Agent[Cart]):
        async def plan(self, ctx: Context, state: Cart) -> list[PlanStep]:
            state.facts = {"pair": [1, 2]}
            return [PlanStep(key="one", title="one")]

        async def act(self, ctx: Context, state: Cart, step: PlanStep) -> None:
            state.facts = {"pair": (1, 2)}

        async def finish(self, ctx: Context, state: Cart) -> str:
            return "done"

    handle = await app.agent(Twice, name="twice").enqueue("x")
    await work_off(app)
    found = await letter(app, handle)
    assert found.error.endswith(StateError.__name__)
    assert found.message.endswith(": /facts")


class Base(BaseModel):
    name: str = ""


class Derived(Base):
    extra: int = 0


class Private(BaseModel):
    hidden: int = Field(default=0, exclude=True)
    _secret: int = PrivateAttr(default=0)


@dataclass
class Total:
    parts: list[int]
    total: int = field(init=False, default=0)


def private() -> Private:
    made = Private(hidden=2)
    made._secret = 1
    return made


def total() -> Total:
    made = Total([4, 5])
    made.total = 9
    return made


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (list[Base], [Derived(extra=7)], "Derived is read as Base, without extra"),
        (Private, private(), "Private is read as Private, without _secret, hidden"),
        (dict[str, Total], {"a": total()}, "Total is read as Total, without total"),
    ],
)
def test_what_a_later_run_lacks_is_warned_of_once(kind: Any, value: Any, says: str) -> None:
    form = StateType("lossy", state_with(kind | None))
    state = form.kind()
    state.held = value  # type: ignore[attr-defined]  # its field
    stored = form.parsed("t", state, form.dump("t", state))
    with pytest.raises(ResumeWarning, match=f"agent 'lossy': a later run reads field 'held' .* differently: {says}"):
        form.read_back("t", state, stored, ["held"])


class Hidden(BaseModel):
    token: str = Field(exclude=True)


class Unread(BaseModel):
    """Its serialiser writes what its validator refuses."""

    number: int = Field(ge=0)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (dict[tuple[int, int], int], "a key of a JSON object is text, and not a tuple; use text as keys"),
        (list[dict[Base, int]], "a key of a JSON object is text, and not a model; use text as keys"),
        (list[Hidden], "field 'token' of Hidden is excluded from what is stored and has no default; give it one"),
    ],
)
def test_a_type_that_cannot_be_read_is_refused_when_the_agent_is_declared(app: App, kind: Any, says: str) -> None:
    agent = remembering(state_with(kind | None), None)
    with pytest.raises(TaskDefinitionError, match=f"field 'held' of its state Holding could not be read .*: {says}$"):
        app.agent(agent, name="refused")


def test_an_excluded_field_is_refused_when_the_agent_is_declared(app: App) -> None:
    agent = remembering(create_model("Holding", __base__=AgentState, held=(int, Field(default=0, exclude=True))), 1)
    with pytest.raises(TaskDefinitionError, match=r"excluded from what is stored; make it Annotated\[..., Ephemeral\]"):
        app.agent(agent, name="refused")


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (
            int,
            2**64,
            "field 'held': an integer must have at most 64 bits, got 18446744073709551616...; store it as text",
        ),
        (Any, {"a": [-(2**63) - 1]}, "field 'held': an integer must have at most 64 bits, got -9223372036854775809"),
        pytest.param(int, 10**4_500, "field 'held': ", id="digits"),
        (list[Unread], [Unread.model_construct(number=-1)], "field 'held': 0.number: Input should be greater than"),
    ],
)
async def test_a_value_that_cannot_be_read_is_refused_when_it_is_stored(
    app: App, kind: Any, value: Any, says: str
) -> None:
    handle = await app.agent(remembering(state_with(kind | None), value), name="refused").enqueue("x")
    await work_off(app)
    found = await letter(app, handle)
    assert found.reason == Reason.NOT_RETRYABLE
    assert found.error.endswith(StateError.__name__)
    assert says in found.message
    past = await state_at(app.producer.gateway, handle.partition, handle.id)
    assert past.state["held"] is None, "the log can be read"


async def test_an_input_that_cannot_be_read_is_refused_before_the_agent_plans(app: App) -> None:
    class Early(Agent[Any]):
        state_type = create_model("Holding", __base__=AgentState, held=(Unread, Unread.model_construct(number=-1)))

        async def plan(self, ctx: Context, state: Any) -> list[PlanStep]:
            raise AssertionError("it planned")

        async def act(self, ctx: Context, state: Any, step: PlanStep) -> None: ...

        async def finish(self, ctx: Context, state: Any) -> None: ...

    handle = await app.agent(Early, name="early").enqueue("x")
    await work_off(app)
    assert (await letter(app, handle)).error.endswith(StateError.__name__)


@pytest.mark.parametrize("digits", [25, 4_500])
async def test_a_result_with_an_integer_that_cannot_be_read_is_refused(app: App, digits: int) -> None:
    class Counting(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="count", title="count")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> list[int]:
            return [10**digits]

        async def finish(self, ctx: Context, state: AgentState) -> None: ...

    handle = await app.agent(Counting, name="counting").enqueue("x")
    await work_off(app)
    assert (await letter(app, handle)).reason == Reason.UNSERIALISABLE_RESULT


class Lower(AgentState):
    held: str | None = None

    @field_validator("held")
    @classmethod
    def lower(cls, value: str | None) -> str | None:
        return None if value is None else value.lower()


async def test_the_validators_of_the_state_class_apply(app: App) -> None:
    agent: Any = remembering(Lower, "ABC")
    handle = await app.agent(agent, name="lower", retry=Retry(max_attempts=2, base=0.0)).enqueue("x")
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    assert agent.seen == ["abc", "abc"]


async def test_validators_that_change_a_value_each_time_are_refused(app: App) -> None:
    """Each run would read another value."""

    class Scaled(AgentState):
        held: int = 0

        @field_validator("held", mode="before")
        @classmethod
        def scale(cls, value: int) -> int:
            return value * 100

    handle = await app.agent(remembering(Scaled, 2), name="scaled").enqueue("x")
    await work_off(app)
    assert "'held': its validators change again what they have returned" in (await letter(app, handle)).message


def test_fields_that_a_dataclass_computes_are_computed_again() -> None:
    """The state forbids unknown keys, and so does a dataclass in it."""
    form = StateType("computes", state_with(dict[str, list[Total]] | None))
    state = form.kind()
    state.held = {"a": [Total([1, 2])]}  # type: ignore[attr-defined]  # its field
    stored = form.parsed("t", state, form.dump("t", state))
    assert stored["held"] == {"a": [{"parts": [1, 2]}]}
    assert form.load("t", stored).held == state.held  # type: ignore[attr-defined]
