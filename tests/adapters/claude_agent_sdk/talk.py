"""A task that mirrors a conversation into the store, as the SDK does, and asks a person before its last turn."""

from __future__ import annotations

from claude_agent_sdk import SessionKey
from perdure import App, Context
from perdure.integrations.claude_agent_sdk import PerdureSessionStore

from tests.adapters.support.journal import note_async

app = App("talk")
sessions = PerdureSessionStore(app)
KEY: SessionKey = {"project_key": "project", "session_id": "talk"}


async def say(turn: int) -> None:
    await note_async(f"say {turn}")
    await sessions.append(KEY, [{"type": "assistant", "uuid": f"turn-{turn}", "text": f"turn {turn}"}])
    await note_async(f"said {turn}")


@app.task
async def talk(ctx: Context, asks: bool = False) -> int:
    for turn in range(3):
        if asks and turn == 2:
            await ctx.wait_for("go-on", bool)
        await ctx.step(f"turn-{turn}", say, turn)
    return len(await sessions.load(KEY) or ())
