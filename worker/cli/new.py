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

_APP: Final = '''\
"""Tasks of the app $name.

    perdure worker run app.py:app
    perdure enqueue count_words --args '{"path": "app.py"}'
"""

from pathlib import Path

from perdure import App, Context, Retry

app = App("$name")


def read_lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


@app.task(retry=Retry(max_attempts=3))
async def count_words(ctx: Context, path: str) -> int:
    """Return the number of words in a file."""
    lines = await ctx.step("read", read_lines, path)  # recorded once, even if the worker is killed
    return sum(len(line.split()) for line in lines)
'''

_TEST: Final = '''\
"""Tests of the app: by a worker on a server of the test run, and of the handler alone."""

import asyncio
from pathlib import Path

from perdure.testing import PerdureFixture, make_context

from app import app, count_words


def test_a_worker_counts_words(perdure: PerdureFixture, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("one two\\nthree\\n")

    async def count() -> int:
        async with app:
            handle = await count_words.enqueue(str(path))
            await perdure.run_until_idle(app)
            return await handle.result(timeout=10)

    assert asyncio.run(count()) == 3


def test_a_recorded_step_is_not_repeated() -> None:
    async def count() -> int:
        return await count_words(make_context(recorded={"read": ["one two"]}), "no such file")

    assert asyncio.run(count()) == 2
'''

_DOCKERFILE: Final = """\
# docker build -t $image . && docker run --env PERDURE_REDIS_URL=redis://redis.internal:6379/0 $image
FROM python:$python-slim
RUN pip install --no-cache-dir "perdure==$version"
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /app --shell /usr/sbin/nologin perdure
WORKDIR /app
COPY app.py ./
# By number, so that an orchestrator can see that it is not root.
USER 10001:10001
# The worker finishes its current steps, and releases what is left to other workers.
STOPSIGNAL SIGTERM
ENTRYPOINT ["perdure"]
CMD ["worker", "run", "app.py:app", "--processes", "2"]
"""

_FILES: Final = {"app.py": _APP, "test_app.py": _TEST, "Dockerfile": _DOCKERFILE}


@parser
def _read_name(text: str) -> str:
    return check_name("NAME", text)


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", parser=_read_name, help="Name of the app and of its folder.")],
) -> None:
    """Create a folder with an app, its test and its Dockerfile.

    The test needs pytest and the extra "embedded". An existing folder is
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
            (folder / file).write_text(Template(text).substitute(values), encoding="utf-8")
            print_text(str(folder / file))
    except FileExistsError as error:
        raise Failed(f"could not create {folder}: it exists; choose another name") from error
    except OSError as error:
        raise Failed(f"could not create {folder}: {error.strerror}") from error
    note(f"created the app {name}; next: cd {name} && python -m pytest, then perdure worker run app.py:app")
