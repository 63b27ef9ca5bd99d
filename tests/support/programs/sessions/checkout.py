"""Worker process of an agent that works in a git checkout with a virtual environment, one commit in each turn."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Worker

app = App("checkout")

_SCRIPT = """#!{folder}/env/bin/python
import sys
print(sys.prefix)
"""


class Checkout(AgentState):
    """Commits that the turns have made."""

    commits: int = 0


def note(what: str, key: str) -> None:
    """Append a line to the journal: the process, what happened, and the message."""
    with Path(os.environ["JOURNAL"]).open("a") as journal:
        journal.write(f"{os.getpid()} {what} {key}\n")


def run(folder: Path, *command: str) -> str:
    """Run a command in the checkout, as an agent does; return what it prints."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} failed in {folder}: {done.stderr}")
    return done.stdout.strip()


def git(folder: Path, *arguments: str) -> str:
    return run(folder, "git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments)


def create(folder: Path, outside: str) -> None:
    """Make a repository with all that a checkout may have, and an environment that is not tracked."""
    git(folder, "init", "-q", "-b", "main")
    (folder / "tool.sh").write_text("#!/bin/sh\necho tool")
    (folder / "tool.sh").chmod(0o755)
    (folder / "latest").symlink_to("tool.sh")
    (folder / "docs").mkdir()
    (folder / "docs" / "up").symlink_to("../tool.sh")
    (folder / "outside").symlink_to(outside)
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9")).write_text("latin-1")
    (folder / ".gitignore").write_text("env\nkey\n")
    (folder / "key").write_text("secret")
    (folder / "key").chmod(0o600)
    run(folder, sys.executable, "-m", "venv", "--without-pip", "env")
    (folder / "env" / "bin" / "tool").write_text(_SCRIPT.format(folder=folder))
    (folder / "env" / "bin" / "tool").chmod(0o755)


def commit(folder: Path, number: int) -> None:
    (folder / f"{number}.txt").write_text(str(number))
    git(folder, "checkout", "-q", "-b", f"work-{number}")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", f"commit {number}")
    git(folder, "checkout", "-q", "-B", "main")
    git(folder, "gc", "-q", "--prune=now")


def look(folder: Path) -> str:
    """Return what git and the environment say of the checkout: the number of commits, if all is as it was left."""
    assert git(folder, "status", "--porcelain") == ""
    git(folder, "fsck", "--strict")
    assert run(folder, "./latest") == run(folder, "docs/up") == "tool"
    prefix = str(folder / "env")
    assert run(folder, "env/bin/python", "-c", "import sys; print(sys.prefix)") == prefix
    assert run(folder, "env/bin/tool") == prefix, "a script of the environment names it by its whole path"
    assert (folder / "key").stat().st_mode & 0o777 == 0o600
    return git(folder, "rev-list", "--count", "HEAD")


async def hold(ctx: Context, number: int) -> None:
    """Wait for the file that lets this turn continue, with work in the folder that no step has recorded."""
    folder = ctx.workspace.path
    (folder / "half.txt").write_text("half")
    (folder / ".git" / "index.lock").write_text("")
    note("holds", str(number))
    while not await anyio.Path(f"{os.environ['JOURNAL']}-{number}").exists():  # noqa: ASYNC110 - a file has no event
        await anyio.sleep(0.005)
    (folder / "half.txt").unlink()
    (folder / ".git" / "index.lock").unlink()


class Coder(Agent[Checkout]):
    """Commits once in each turn, and is killed between the commit and the look at it."""

    async def plan(self, ctx: Context, state: Checkout) -> list[PlanStep]:
        return [PlanStep(key=key, title=key) for key in ("commit", "hold", "look")]

    async def act(self, ctx: Context, state: Checkout, step: PlanStep) -> str:
        folder = ctx.workspace.path
        number = state.commits + (1 if step.key == "commit" else 0)
        if step.key == "commit":
            note("folder", str(folder))
            if number == 1:
                await ctx.step("create", create, folder, state.goal)
            else:
                await ctx.step("before", look, folder)
            await ctx.step("commit", commit, folder, number)
            state.commits = number
        elif step.key == "hold":
            await hold(ctx, number)
        else:
            return await ctx.step("look", look, folder)
        return ""

    async def finish(self, ctx: Context, state: Checkout) -> str:
        return str(state.results["look"])


app.agent(Coder, name="coder", retry=Retry(max_attempts=1, max_crashes=1000, base=0.0))


async def main(concurrency: int) -> None:
    async with app, Worker(app, concurrency=concurrency) as worker:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]))
