"""Options that do not exist: each error names the option that was meant, and lists the others."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from perdure import Agent, App, Context, Retry, Settings
from perdure.queues.errors import ConfigurationError
from perdure.worker.arguments import CALL_OPTIONS
from perdure.worker.errors import InvalidArguments, TaskDefinitionError
from perdure.worker.task import Task

app: Any = App("shop")
policy: Any = Retry
make_settings: Any = Settings


async def handler(ctx: Context, path: str, delay: float = 0) -> None: ...


audit: Any = app.task(name="audit")(handler)


class Report(Agent[Any]):
    async def plan(self, ctx: Any, state: Any) -> Any: ...

    async def act(self, ctx: Any, state: Any, step: Any) -> Any: ...

    async def finish(self, ctx: Any, state: Any) -> Any: ...


report: Any = app.agent(Report)


async def stream() -> None:
    async for _ in audit.enqueue_stream([{"path": "src"}], tags=["a"]):
        pass


OF_CALLS: dict[str, tuple[Callable[[], Awaitable[Any]], str]] = {
    "an option": (
        lambda: audit.enqueue("src", queue="slow"),
        "queue'; options come before the call: options(queue=...)",
    ),
    "another word": (
        lambda: audit.options(key="a").enqueue("src", countdown=5),
        "countdown'; options come before the call: options(delay=...)",
    ),
    "a typo": (lambda: audit.enqueue("src", dealy=5), "dealy'; its arguments are path, delay; did you mean 'delay'?"),
    "an agent": (lambda: report.enqueue("check", queue="slow"), "queue'; its arguments are goal"),
    "options of many": (
        lambda: audit.enqueue_many([], tags=["a"]),
        "tags'; options come before the call: options(tags=...)",
    ),
    "options of a stream": (stream, "tags'; options come before the call: options(tags=...)"),
}


@pytest.mark.parametrize("mistake", OF_CALLS)
async def test_an_option_among_the_arguments_is_named_with_its_place(mistake: str) -> None:
    enqueue, text = OF_CALLS[mistake]
    with pytest.raises(InvalidArguments) as raised:
        await enqueue()
    assert str(raised.value).endswith(text)
    assert "got an unexpected keyword argument '" in str(raised.value)


@pytest.mark.integration
async def test_other_ways_to_enqueue_say_the_same(settings: Settings) -> None:
    shop = App("shop", settings=settings)
    other: Any = shop.task(name="other")(handler)
    calls: list[Callable[[], Any]] = [
        lambda: other.enqueue_sync("src", key="a"),
        lambda: other.enqueue_many_sync([{"path": "src", "key": "a"}]),
        lambda: other.enqueue_many_sync([{"path": "src"}], key="a"),
    ]
    for call in calls:
        with pytest.raises(InvalidArguments, match=r"'key'; options come before the call: options\(key=\.\.\.\)"):
            await asyncio.to_thread(call)
    await asyncio.to_thread(shop.sync().close)


OF_OPTIONS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "delay of Retry": (lambda: policy(delay=1), TypeError, "field of Retry is called delay; there are max_attempts, "),
    "its base": (lambda: policy(delay=1), TypeError, "; use base"),
    "its attempts": (lambda: policy(max_retries=1), TypeError, "; use max_attempts, which counts the first attempt"),
    "a typo of Retry": (lambda: policy(attempts_max=1), TypeError, "; did you mean 'max_attempts'?"),
    "a call": (lambda: audit.options(retries=1), InvalidArguments, "option of a call is called retries; there are"),
    "a task": (lambda: app.task(max_attempts=3), TaskDefinitionError, "; use retry=Retry(max_attempts=...)"),
    "a task's call": (lambda: app.task(delay=3), TaskDefinitionError, "of each call: options(delay=...).enqueue(...)"),
    "an agent": (lambda: app.agent(Report, nam="a"), TaskDefinitionError, "option of app.agent is called nam; there"),
    "a setting": (
        lambda: make_settings(leese=3),
        ValueError,
        "no setting is called leese; help(perdure.Settings)",
    ),
    "a setting read": (lambda: app.configure(leese=3), ConfigurationError, "lists them; did you mean 'lease'?"),
}


@pytest.mark.parametrize("mistake", OF_OPTIONS)
def test_an_unknown_option_is_named_with_the_one_that_was_meant(mistake: str) -> None:
    make, error, text = OF_OPTIONS[mistake]
    with pytest.raises(error) as raised:
        make()
    assert text in str(raised.value)


def test_a_wrong_value_of_retry_keeps_its_message() -> None:
    with pytest.raises(TypeError, match=r"Retry\.max_attempts must be a whole number, got '3'"):
        policy(max_attempts="3")


def test_the_options_of_a_call_are_those_of_its_method() -> None:
    parameters = inspect.signature(Task.options).parameters.values()
    assert tuple(one.name for one in parameters if one.kind is one.KEYWORD_ONLY) == CALL_OPTIONS
