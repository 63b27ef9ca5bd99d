"""`perdure new`: the files of a new app."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Annotated, Final

import typer

from ...queues.keys import check_name
from .support.errors import Failed
from .support.options import parser
from .support.output import note, print_text

_README: Final = """\
# $name

Durable tasks on Perdure.

## Start

    pip install -r requirements-dev.txt
    python -m pytest
    perdure worker run app:app --reload

The worker restarts when you save a file. In a second terminal, in this folder:

    perdure enqueue report --queue $name --args '{"paths": ["app.py", "README.md"]}' --id $name-1
    perdure task result $name-1
    perdure task show $name-1

Without `PERDURE_REDIS_URL`, all commands share a server of this computer, which starts by itself. `perdure docs` prints
the documentation, and `perdure dashboard` shows the tasks in a browser (`pip install 'perdure[web]'`).

## Files

| file | content |
|---|---|
| `app.py` | the app, and the list of the modules of its tasks: add each new module there |
| `tasks/words.py` | a task with a recorded step |
| `tasks/reports.py` | a task that spawns others and waits for them |
| `tests/test_tasks.py` | the tests: by a worker on a server of the test run, and of a handler alone |
| `requirements.txt` | what the app needs, `requirements-dev.txt`: what its developers need as well |
| `Dockerfile` | the image of the worker |
"""

_APP: Final = '''\
"""The app $name. Its tasks are in the modules that it includes, which import it: workers import them."""

from perdure import App

app = App("$name", include=["tasks.words", "tasks.reports"])
'''

_WORDS: Final = '''\
"""Words of files.

    perdure enqueue count_words --queue $name --args '{"path": "app.py"}'
"""

from pathlib import Path

from perdure import Context, Retry

from app import app


def read_lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


@app.task(retry=Retry(max_attempts=3))
async def count_words(ctx: Context, path: str) -> int:
    """Return the number of words in a file."""
    lines = await ctx.step("read", read_lines, path)  # recorded once, even if the worker is killed
    return sum(len(line.split()) for line in lines)
'''

_REPORTS: Final = '''\
"""Reports on many files.

    perdure enqueue report --queue $name --args '{"paths": ["app.py", "README.md"]}'
"""

from perdure import Context

from app import app
from tasks.words import count_words


@app.task
async def report(ctx: Context, paths: list[str]) -> dict[str, int]:
    """Return the number of words in each file."""
    counts = await ctx.gather(count_words, paths)  # one task per file; this one needs no worker meanwhile
    return dict(zip(paths, counts, strict=True))
'''

_TEST: Final = '''\
"""Tests of the tasks: by a worker on a server of the test run, and of a handler alone."""

import asyncio
from pathlib import Path

from perdure.testing import PerdureFixture, make_context

from app import app
from tasks.reports import report
from tasks.words import count_words


def test_a_worker_makes_a_report(perdure: PerdureFixture, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("one two\\nthree\\n")

    async def make() -> dict[str, int]:
        async with app:
            handle = await report.enqueue([str(path)])
            await perdure.run_until_idle(app)
            return await handle.result(timeout=10)

    assert asyncio.run(make()) == {str(path): 3}


def test_a_recorded_step_is_not_repeated() -> None:
    async def count() -> int:
        return await count_words(make_context(recorded={"read": ["one two"]}), "no such file")

    assert asyncio.run(count()) == 2
'''

_REQUIREMENTS: Final = """\
perdure==$version
"""

_DEVELOPMENT: Final = """\
-r requirements.txt
perdure[embedded,reload]==$version
pytest
"""

_DOCKERFILE: Final = """\
# docker build -t $image . && docker run --env PERDURE_REDIS_URL=redis://redis.internal:6379/0 $image
FROM python:$python-slim
WORKDIR /app
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /app --shell /usr/sbin/nologin perdure
COPY app.py ./
COPY tasks tasks
# By number, so that an orchestrator can see that it is not root.
USER 10001:10001
# The worker finishes its current steps, and releases what is left to other workers.
STOPSIGNAL SIGTERM
ENTRYPOINT ["perdure"]
CMD ["worker", "run", "app:app", "--processes", "2"]
"""

_FILES: Final = {
    "README.md": _README,
    "app.py": _APP,
    "tasks/__init__.py": "",
    "tasks/words.py": _WORDS,
    "tasks/reports.py": _REPORTS,
    "tests/test_tasks.py": _TEST,
    "requirements.txt": _REQUIREMENTS,
    "requirements-dev.txt": _DEVELOPMENT,
    "Dockerfile": _DOCKERFILE,
}


@parser
def _read_name(text: str) -> str:
    return check_name("NAME", text)


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", parser=_read_name, help="Name of the app and of its folder.")],
) -> None:
    """Create a folder with an app of two modules, its tests and its image.

    Its README says what to install and how to run it. An existing folder is
    left as it is, and the command fails.

    Example: perdure new shop
    """
    folder = Path(name)
    values = {
        "name": name,
        "image": name.lower(),
        "python": "{}.{}".format(*sys.version_info),
        "version": version("perdure"),
    }
    try:
        folder.mkdir()
        for file, text in _FILES.items():
            path = folder / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(Template(text).substitute(values), encoding="utf-8")
            print_text(str(path))
    except FileExistsError as error:
        raise Failed(f"could not create {folder}: it exists; choose another name") from error
    except OSError as error:
        raise Failed(f"could not create {folder}: {error.strerror}") from error
    note(
        f"created the app {name}; next: cd {name} && pip install -r requirements-dev.txt && python -m pytest, then "
        "perdure worker run app:app --reload; README.md says more"
    )
