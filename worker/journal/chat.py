"""A conversation's messages, as no provider in particular writes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["Message", "Role", "ToolCall"]

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(BaseModel):
    """A call that a model asks for. id: the provider's; the result's message names it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    name: str
    arguments: dict[str, Any] = {}


class Message(BaseModel):
    """One turn of a conversation. tool_calls: what an assistant asks for. tool_call_id: which call a tool answers.

    n: the number of the event that it came with, once it is in a state; of a summary, the first that it stands for.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    n: int | None = None
