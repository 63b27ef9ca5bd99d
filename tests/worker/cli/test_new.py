"""`perdure new`: its files run as they are, and nothing is overwritten."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from perdure.queues.embedded.control import stop

from tests.support.command_line import BOUND, call, process

FILES = [
    *("README.md", "app.py", "tasks/__init__.py", "tasks/words.py", "tasks/reports.py", "tests/test_tasks.py"),
    *("requirements.txt", "requirements-dev.txt", "Dockerfile"),
]


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
        [sys.executable, "-m", "pytest", "-q", "-p", "perdure.worker.testing.plugin", "-p", "no:cacheprovider"],
        cwd=folder / "shop",
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # make test-wheel loads what is installed
        capture_output=True,
        text=True,
        timeout=2 * BOUND,
        check=False,
    )
    assert "2 passed" in tested.stdout, tested.stdout + tested.stderr


@pytest.mark.integration
@pytest.mark.processes
def test_what_the_image_copies_runs_the_task_of_the_readme(folder: Path) -> None:
    call("new", "shop")
    lines = [line.partition(" ") for line in (folder / "shop" / "Dockerfile").read_text().splitlines()]
    image = folder / "image"
    image.mkdir()
    for source, target in (value.split() for head, _, value in lines if head == "COPY"):
        copy: Callable[..., Any] = shutil.copytree if (folder / "shop" / source).is_dir() else shutil.copy
        copy(folder / "shop" / source, image / target)
    [command] = [json.loads(value) for head, _, value in lines if head == "CMD"]
    assert [json.loads(value) for head, _, value in lines if head == "ENTRYPOINT"] == [["perdure"]]

    readme = (folder / "shop" / "README.md").read_text()
    lines_of_commands = [line for line in readme.splitlines() if re.match(" +perdure (enqueue|task result)", line)]
    enqueue, result = (shlex.split(line)[1:] for line in lines_of_commands)
    (image / "README.md").write_text(readme)
    place = ("--data-dir", str(folder / "data"))
    try:
        first = ("worker", "run", "app:app", "--no-supervisor", "--burst")  # publishes the queues of the tasks
        assert process(*first, *place, cwd=image).code == 0
        assert process(*enqueue, *place, cwd=image).ids == ["shop-1"]
        ran = process(*command, "--burst", *place, cwd=image)
        assert ran.code == 0, ran.err
        counts = {name: len((image / name).read_text().split()) for name in ("app.py", "README.md")}
        assert process(*result, *place).json == counts
    finally:
        stop(folder / "data", force=True)


@pytest.mark.integration
@pytest.mark.processes
def test_two_new_apps_on_one_server_do_not_disturb_each_other(folder: Path) -> None:
    place = ("--data-dir", str(folder / "data"))
    try:
        for name in ("shop", "audit"):
            call("new", name)
            first = ("worker", "run", "app:app", "--no-supervisor", "--burst")
            assert process(*first, *place, cwd=folder / name).code == 0
        for name in ("shop", "audit"):
            readme = (folder / name / "README.md").read_text()
            [line] = [line for line in readme.splitlines() if "perdure enqueue" in line]
            assert process(*shlex.split(line)[1:], *place, cwd=folder / name).ids == [f"{name}-1"]
    finally:
        stop(folder / "data", force=True)


def test_the_readme_names_each_file_and_the_commands_exist(folder: Path) -> None:
    call("new", "shop")
    readme = (folder / "shop" / "README.md").read_text()
    assert [name for name in FILES if name not in readme and "__init__" not in name and name != "README.md"] == []
    commands = re.findall(r"^ +perdure (.+)$", readme, re.M)
    assert len(commands) == 4
    for command in commands:
        path = list(itertools.takewhile(str.isalpha, shlex.split(command)))
        assert call(*path[:2], "--help").code == 0


def test_what_the_readme_installs_includes_what_its_commands_need(folder: Path) -> None:
    call("new", "shop")
    needed = (folder / "shop" / "requirements-dev.txt").read_text().split("\n")
    assert f"perdure[embedded,reload]=={version('perdure')}" in needed
    assert {"-r requirements.txt", "pytest"} <= set(needed)


def test_the_image_has_this_version_and_this_python(folder: Path) -> None:
    call("new", "Shop")
    text = (folder / "Shop" / "Dockerfile").read_text()
    assert (folder / "Shop" / "requirements.txt").read_text() == f"perdure=={version('perdure')}\n"
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
