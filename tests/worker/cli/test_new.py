"""`perdure new`: its files run as they are, and nothing is overwritten."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from perdure.queues.embedded.control import stop

from tests.support.command_line import BOUND, call, process

FILES = ["app.py", "test_app.py", "Dockerfile"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.integration
@pytest.mark.processes
def test_the_test_of_a_new_app_passes(folder: Path) -> None:
    answer = call("new", "shop")
    assert (answer.code, answer.ids) == (0, [f"shop/{file}" for file in FILES])
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider"],
        cwd=folder / "shop",
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert "2 passed" in tested.stdout, tested.stdout + tested.stderr


@pytest.mark.integration
@pytest.mark.processes
def test_the_command_of_the_dockerfile_runs_the_task_that_the_app_describes(folder: Path) -> None:
    call("new", "shop")
    lines = (folder / "shop" / "Dockerfile").read_text().splitlines()
    instructions = {head: value for head, _, value in (line.partition(" ") for line in lines)}
    image = folder / "image"
    image.mkdir()
    shutil.copy(folder / "shop" / instructions["COPY"].split()[0], image)
    command = json.loads(instructions["CMD"])
    assert json.loads(instructions["ENTRYPOINT"]) == ["perdure"]

    line = next(line for line in (image / "app.py").read_text().splitlines() if "perdure enqueue" in line)
    place = ("--data-dir", str(folder / "data"))
    assert "--queue" not in line
    try:
        first = ("worker", "run", "app.py:app", "--no-supervisor", "--burst")  # publishes the queue of the task
        assert process(*first, *place, cwd=image).code == 0
        [task_id] = process(*shlex.split(line)[1:], *place, cwd=image).ids
        ran = process(*command, "--burst", *place, cwd=image)
        assert ran.code == 0, ran.err
        words = len((image / "app.py").read_text().split())
        assert process("task", "result", task_id, *place).out == f"{words}\n"
    finally:
        stop(folder / "data", force=True)


def test_the_image_has_this_version_and_this_python(folder: Path) -> None:
    call("new", "Shop")
    text = (folder / "Shop" / "Dockerfile").read_text()
    assert f'"perdure=={version("perdure")}"' in text
    assert "FROM python:{}.{}-slim".format(*sys.version_info) in text
    assert "docker build -t shop " in text  # names of images are lower case


def test_an_existing_folder_is_refused_and_left_as_it_is(folder: Path) -> None:
    (folder / "shop").mkdir()
    answer = call("new", "shop")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == "perdure: could not create shop: it exists; choose another name\n"
    assert list((folder / "shop").iterdir()) == []


@pytest.mark.parametrize("name", ["two words", "../shop", "-", ".", "a/b", "größe", 'a"b', "x" * 65])
def test_a_name_that_no_app_can_have_is_refused(folder: Path, name: str) -> None:
    answer = call("new", "--", name)
    assert (answer.code, answer.out) == (2, "")
    assert "NAME must be 1 to 64 letters, digits" in answer.err
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/proc" if Path("/proc").exists() else "/dev")
    answer = call("new", "shop")
    assert answer.code == 1
    assert answer.err.startswith("perdure: could not create shop: ")
