"""`perdure verify`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import call

pytestmark = pytest.mark.integration

APP = """
from perdure import App, Context
from perdure.testing import record_effect

app = App("shop")


@app.task
async def good(ctx: Context, number: int) -> int:
    answer = await ctx.wait_for("approval", int)
    return answer + await ctx.step("one", lambda: number)


@app.task
async def bad(ctx: Context) -> int:
    record_effect("mail")
    return await ctx.step("one", lambda: 1)
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "verified_shop.py"
    path.write_text(APP)
    return f"{path}:app"


def test_a_task_that_continues_as_before(spec: str) -> None:
    done = call("verify", spec, "good", "--args", '{"number": 1}', "--answer", "approval=2", "--yes", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["outcome"], found["problems"], found["repeated"]) == ("succeeded: 3", [], {"one": 1})
    assert found["crashes"] == 2 * len(found["writes"])


def test_a_task_that_does_not_exits_with_1(spec: str) -> None:
    done = call("verify", spec, "bad", "--yes", "--limit", "2")
    assert done.code == 1
    assert "effect 'mail' happened 1 more time outside of a step" in done.out
    assert "2 crashes" in done.err
    assert "problems: 1" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("unknown", "--yes"), 2, "app 'shop' has no task 'unknown'; it has: bad, good"),
        (("good", "--yes", "--args", "[]"), 2, "--args"),
        (("good", "--yes", "--answer", "approval"), 2, "--answer: must be NAME=JSON, got 'approval'"),
        (("good",), 2, "verify calls the functions of the steps for real, many times: add --yes"),
        (("good", "--yes", "--args", '{"number": 1}'), 1, "it waits for 'approval': give --answer NAME=JSON"),
    ],
)
def test_wrong_use_names_the_remedy(spec: str, arguments: tuple[str, ...], code: int, text: str) -> None:
    done = call("verify", spec, *arguments)
    assert done.code == code
    assert text in done.err
