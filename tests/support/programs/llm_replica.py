"""A worker of examples/llm_agent.py, whose tools write to the journal before and after they act."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
from perdure import Worker, current_step

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)
EXAMPLE = Path(__file__).parents[3] / "examples" / "llm_agent.py"


def note(what: str) -> None:
    """Append one line in one write, so that lines of several processes never mix."""
    os.write(JOURNAL, f"{os.getpid()} {what} {current_step().key}\n".encode())


def noted(tool: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(tool)
    def noting(*args: Any, **kwargs: Any) -> str:
        note("begin")
        answer = tool(*args, **kwargs)
        note("end")
        return answer

    return noting


def load() -> Any:
    spec = importlib.util.spec_from_file_location("llm_agent", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def main() -> None:
    example = load()
    example.TOOLS.update({name: noted(tool) for name, tool in example.TOOLS.items()})
    async with Worker(example.app, concurrency=int(sys.argv[1])) as worker:
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
