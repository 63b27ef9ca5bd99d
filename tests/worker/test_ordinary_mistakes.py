"""Ordinary mistakes of a new user, and the messages that docs/reference/errors.md has for them."""

import gc
import re
import sys
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Context, Producer, Retry, TaskFailed
from perdure.queues import generate_key
from perdure.queues.security import encryption
from perdure.queues.security.encryption import make_encryptor
from perdure.testing import run_until_idle
from perdure.worker.settings import Settings

from tests.support.command_line import call
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

PAGE = ROOT / "docs" / "reference" / "errors.md"
Handler = Callable[..., Coroutine[Any, Any, Any]]


def size_of(path: str) -> int:
    return len(path)


async def unawaited_result(ctx: Context, path: str) -> int:
    return ctx.step("size", size_of, path)  # type: ignore[return-value]


async def unawaited_step(ctx: Context, path: str) -> None:
    ctx.step("size", size_of, path)  # type: ignore[unused-coroutine]  # noqa: RUF100


async def called_function(ctx: Context, path: str) -> Any:
    return await ctx.step("size", size_of(path))  # type: ignore[call-overload]


async def misplaced_option(ctx: Context, path: str) -> Any:
    return await ctx.step("size", size_of, path, timeout=30)  # type: ignore[call-arg, arg-type]


async def object_result(ctx: Context, path: str) -> Any:
    return await ctx.step("open", object)


async def equal_ids(ctx: Context, path: str) -> None:
    await ctx.options(step_id="a").step("size", size_of, path)
    await ctx.options(step_id="a").step("size", size_of, path)


def in_a_task(handler: Handler) -> Callable[[App], Coroutine[Any, Any, None]]:
    """Return a function that runs a handler as the task `size`, and raises what its dead letter says."""

    async def run(app: App) -> None:
        app.task(name="size", retry=Retry(max_attempts=1))(handler)
        async with app:
            await app.tasks["size"].enqueue("abc")
            await run_until_idle(app)

    return run


async def never_awaited(app: App) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        caught: list[Any] = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "unraisablehook", lambda unraisable: caught.append(unraisable.exc_value))
            await in_a_task(unawaited_step)(app)
            gc.collect()
    raise caught[0]


async def after_the_end(app: App) -> None:
    kept: list[Context] = []

    async def keep(ctx: Context, path: str) -> None:
        kept.append(ctx)

    await in_a_task(keep)(app)
    await kept[0].step("size", size_of, "abc")


async def no_context(app: App) -> None:
    @app.task  # type: ignore[arg-type]
    async def size(path: str) -> int:
        return len(path)


async def equal_names(app: App) -> None:
    app.task(name="size")(equal_ids)
    app.task(name="size")(object_result)


async def plain_call(app: App) -> None:
    async def size(ctx: Context, path: str) -> None: ...

    await app.task(size)("abc")  # type: ignore[call-arg, arg-type]


async def wrong_argument(app: App) -> None:
    async with app:
        await app.task(name="size")(equal_ids).enqueue("abc", file="abc")  # type: ignore[call-arg]


async def option_among_arguments(app: App) -> None:
    async with app:
        await app.task(name="size")(equal_ids).enqueue("abc", delay=5)  # type: ignore[call-arg]


async def other_retry_policy(app: App) -> None:
    app.task(name="size", retry=Retry(max_retries=3))(equal_ids)  # type: ignore[call-arg]


async def closed_app(app: App) -> None:
    await app.task(name="size")(equal_ids).enqueue("abc")


async def misspelt_name(app: App) -> None:
    app.task(name="size")(equal_ids)
    await run_until_idle(app)  # the worker publishes its tasks
    async with Producer(address=app.settings.address, namespace=app.settings.namespace) as producer:
        await producer.enqueue("siez", {"path": "abc"})


async def no_worker(app: App) -> None:
    async with app:
        handle = await app.task(name="size")(equal_ids).enqueue("abc")
        await handle.result(timeout=0.2)


async def no_redis(app: App) -> None:
    async with App("shop", redis_url="redis://127.0.0.1:1/0"):
        pass


async def missing_extra(app: App) -> None:
    keys = generate_key()
    with pytest.MonkeyPatch.context() as patched:
        for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
            patched.delitem(sys.modules, name)
        patched.setitem(sys.modules, "cryptography", None)
        patched.delitem(sys.modules, f"{encryption.__package__}.aesgcm", raising=False)
        make_encryptor(keys, None)


MISTAKES: dict[str, Callable[[App], Coroutine[Any, Any, None]]] = {
    "a step without `await`, whose value is returned": in_a_task(unawaited_result),
    "a step without `await`, whose value is not used": never_awaited,
    "a step is given the result of a function": in_a_task(called_function),
    "an option is given to a step": in_a_task(misplaced_option),
    "a step returns an object that is not JSON data": in_a_task(object_result),
    "two steps have one id": in_a_task(equal_ids),
    "a step after the end of its task": after_the_end,
    "a handler without a context": no_context,
    "two tasks have one name": equal_names,
    "a task is called like a function": plain_call,
    "a wrong argument of a task": wrong_argument,
    "an option among the arguments of a task": option_among_arguments,
    "a field of another retry policy": other_retry_policy,
    "an enqueue before the app is open": closed_app,
    "a misspelt name of a task": misspelt_name,
    "no worker serves the queue": no_worker,
    "Redis does not run": no_redis,
    "a package of an extra is missing": missing_extra,
}

COMMANDS = {
    "a command for an app that is not there": ("worker", "run", "shop.py:app", "--no-supervisor"),
    "a command for a file that cannot be imported": ("worker", "run", "broken.py:app", "--no-supervisor"),
    "a command with arguments that are not JSON": ("enqueue", "size", "--args", "{path}"),
}


def documented() -> dict[str, str]:
    section = PAGE.read_text("utf-8").split("\n## Ordinary mistakes\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| (.+?) \| `(.+)` \|$", section, re.MULTILINE))


def test_the_page_has_these_mistakes() -> None:
    assert list(documented()) == [*MISTAKES, *COMMANDS]


def check(message: str, mistake: str) -> None:
    expected = re.escape(documented()[mistake]).replace(r"\.\.\.", ".*")
    assert re.fullmatch(expected, message), message


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_mistake_gets_the_message_of_the_page(mistake: str, settings: Settings) -> None:
    with pytest.raises(Exception) as raised:
        await MISTAKES[mistake](App("shop", settings=settings))
    error: BaseException = raised.value
    if isinstance(error, TaskFailed):
        assert error.__cause__ is not None
        error = error.__cause__
    check(f"{type(error).__name__}: {error}", mistake)


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_wrong_command_gets_the_message_of_the_page(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text("from perdure import App\n\nshop = App('shop')\n")
    (tmp_path / "broken.py").write_text("import nothing_here\n")
    answer = call(*COMMANDS[mistake])
    assert (answer.code, answer.out) == (2, "")
    check(answer.err.strip(), mistake)
