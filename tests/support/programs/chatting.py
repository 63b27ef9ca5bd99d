"""An app whose model call streams its tokens, saves what it has, and kills its process in the middle of the text.

From the environment: DEATHS, the numbers of tokens after which the process dies, once for each; GRAVES, a folder with
a file for each death; CALLS, a file with a line for each token that the model has made.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from perdure import App, Context, Retry, current_step

DEATHS = [int(number) for number in os.environ.get("DEATHS", "").split(",") if number]
CALLS = os.open(os.environ.get("CALLS", os.devnull), os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
WORDS = [f"word{number} " for number in range(40)]

app = App("chatting")


def die(place: str) -> None:
    """Kill this process, once for each place."""
    if not (grave := Path(os.environ["GRAVES"], place)).exists():
        grave.touch()
        os.kill(os.getpid(), signal.SIGKILL)


async def model(text: str) -> AsyncIterator[str]:
    """Yield the tokens that follow a text."""
    for word in WORDS[len(text.split()) :]:
        os.write(CALLS, f"{word}\n".encode())
        yield word


async def complete() -> str:
    step = current_step()
    text: str = step.saved or ""
    if text:
        await step.emit(text, to="tokens")
    async for token in model(text):
        text += token
        await step.emit(token, to="tokens")
        number = len(text.split())
        if number % 10 == 0:
            await step.save(text)
        if number in DEATHS:
            die(str(number))
    return text


@app.task(retry=Retry(max_crashes=10))
async def chat(ctx: Context) -> str:
    await ctx.emit("begin", to="tokens")
    text = await ctx.step("model", complete)
    await ctx.emit("end", to="tokens")
    return text


@app.task(retry=Retry(max_crashes=0))
async def poison(ctx: Context) -> None:
    await ctx.emit("last words")
    await ctx.step("store", int)
    os.kill(os.getpid(), signal.SIGKILL)
