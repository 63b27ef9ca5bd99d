"""Execution of the code blocks of one page, in order, in the current folder: `python -m tests.support.run_page PAGE`.

All Python blocks share the module `__main__`, as if a reader had pasted them into `python -m asyncio`: `await` is
allowed at the top level. A block with a title is written to that file instead. Console blocks run in bash, and what
they print is compared with what the page shows. Exits with 1 and the place in the page if a block fails.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType

from tests.support.documents import Block, blocks_of, commands_of, matches

_MARK = "--end-of-command--"
_MAX_LENGTH = 100.0
"""Seconds that the commands of one block may take."""


def main(page: Path) -> int:
    module = ModuleType("__main__")  # pydantic and typing look annotations up by the name of the module
    sys.modules["__main__"] = module
    sys.path.insert(0, "")
    with asyncio.Runner() as runner:
        for block in blocks_of(page):
            if block.not_run:
                continue
            try:
                if block.kind == "console":
                    run_commands(block)
                elif block.kind == "python" and block.title is not None:
                    Path(block.title).write_text(block.code, "utf-8")
                elif block.kind == "python":
                    run_python(block, module, runner)
            except BaseException as error:  # noqa: BLE001 - whatever a block raises is reported with its place
                traceback.print_exception(error)
                sys.stderr.write(f"failed: {block.name}\n")
                return 1
    return 0


def run_python(block: Block, module: ModuleType, runner: asyncio.Runner) -> None:
    source = "\n" * (block.line - 1) + block.code  # so that tracebacks show the line of the page
    name = str(block.page)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(eval(code, module.__dict__))
    else:
        exec(code, module.__dict__)


def run_commands(block: Block) -> None:
    """Run the commands of a console block in one bash, so that variables live to its end."""
    commands = commands_of(block)
    script = "\n".join(f"{command.text}\nprintf '\\n{_MARK} %s\\n' $?" for command in commands)
    status, output, errors = run_script(script)
    rest = output
    for command in commands:
        printed, _, rest = rest.partition(f"\n{_MARK} ")
        ended, _, rest = rest.partition("\n")
        problem = f"`{command.text}` ended with {ended or status}\n{printed}\n{errors}"
        assert ended == "0", problem
        if command.expected:
            assert matches(command.expected, printed), f"{problem}\nexpected:\n" + "\n".join(command.expected)


def run_script(script: str) -> tuple[int | str, str, str]:
    """Run a script in bash; return its exit code, its output and its errors, the stacks of what hangs among them."""
    process = subprocess.Popen(
        ["bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=_MAX_LENGTH)
        return process.returncode, output, errors
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        return f"a time-out after {_MAX_LENGTH:.0f} s", *process.communicate()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
