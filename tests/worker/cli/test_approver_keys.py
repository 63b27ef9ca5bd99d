"""`perdure keys generate --approver`, and `perdure task answer` with such a key."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import anyio
import pytest
from perdure import App, Context, Settings
from perdure.queues.security.approvers import ApproverKey

from tests.support.command_line import call
from tests.support.workers import work_off


def test_a_pair_of_keys_of_an_approver(environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ada.key"
    made = call("keys", "generate", "--approver", "ada", "-o", str(path))
    assert made.code == 0
    key = ApproverKey.read(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made.out == f"{key.public_line}\n"
    assert key.private_line.split(":")[1] not in made.out + made.err
    assert "set PERDURE_APPROVER_KEY_FILE" in made.err
    again = call("keys", "generate", "--approver", "ada", "-o", str(path))
    assert (again.code, again.out) == (1, "")
    assert ApproverKey.read(path) == key
    assert "--output must name a new file" in call("keys", "generate", "--approver", "ada").err
    assert "name of an approver must be" in call("keys", "generate", "--approver", "a b", "-o", str(path)).err
    monkeypatch.setenv("PERDURE_APPROVERS", made.out)
    monkeypatch.setenv("PERDURE_APPROVER_KEY_FILE", str(path))
    listed = call("keys", "list", "--json").json
    assert (listed["approvers"], listed["signs_as"]) == (["ada"], "ada")
    assert "approver ada\nsigns answers as ada" in call("keys", "list").out


def test_an_answer_is_signed_with_the_key_of_an_approver(
    settings: Settings, environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ada", "eve"):
        assert call("keys", "generate", "--approver", name, "-o", str(tmp_path / name)).code == 0
    ada, eve = (str(tmp_path / name) for name in ("ada", "eve"))
    lines = "\n".join(ApproverKey.read(Path(path)).public_line for path in (ada, eve))

    def work() -> None:
        anyio.run(run)

    async def run() -> None:
        app = App("test", settings=settings.model_copy(update={"approvers": lines}))

        @app.task
        async def pay(ctx: Context) -> Any:
            wait = await ctx.open_wait("approval", bool, who="ada", why="Pay?")
            return [await wait, wait.by]

        async with app:
            await work_off(app)

    task_id = call("enqueue", "pay", "--queue", "test").ids[0]
    work()
    answer = ("task", "answer", task_id, "approval", "true")
    assert call("task", "waiting", task_id, "--json").lines[0]["approvers"] == ["ada"]
    refused = call(*answer, "--by", "ada")
    assert (refused.code, refused.out) == (1, "")
    assert "an approver must sign it: set PERDURE_APPROVER_KEY_FILE to the key of 'ada'" in refused.err
    assert "approver 'eve' may not answer it" in call(*answer, "--approver-key", eve).err
    assert (
        "--by must be left out: the answer is signed as 'ada'" in call(*answer, "--by", "x", "--approver-key", ada).err
    )
    monkeypatch.setenv("PERDURE_APPROVER_KEY_FILE", ada)
    stored = call(*answer)
    assert (stored.code, stored.ids) == (0, [task_id])
    assert "as 'ada'" in stored.err
    monkeypatch.delenv("PERDURE_APPROVER_KEY_FILE")
    work()
    assert call("task", "result", task_id).json == [True, "ada"]
