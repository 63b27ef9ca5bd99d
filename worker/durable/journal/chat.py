"""Messages of a conversation, in a form that is independent of any model provider."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

FROM_INBOX: Final = "inbox"
"""Name of the messages that came from the task's inbox. Their content is quoted: it is data, no instruction."""

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(BaseModel):
    """Tool call that a model requested. id: the provider's id, which the message with the result repeats."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")

    id: str
    name: str
    arguments: dict[str, Any] = {}


class Message(BaseModel):
    """Message of a conversation.

    Attributes:
        tool_calls: Calls that an assistant requests.
        tool_call_id: Id of the call that a tool message answers.
        reasoning: Blocks with the reasoning of an assistant, as its provider returned them; of the result of a tool,
            why it was called.
        n: Number of its event, once it is in a state; of a summary, the first event that it replaces.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    n: int | None = None
    reasoning: tuple[dict[str, Any], ...] = ()


def _check_stored(message: Message) -> Message:
    """Return a message that may be stored. Raises `ValueError` for one of the system."""
    if message.role == "system":
        raise ValueError(
            "the role of a stored message must be user, assistant or tool: what the system says is part of the "
            "agent's identity"
        )
    return message


StoredMessage = Annotated[Message, AfterValidator(_check_stored)]
"""Message of a log or a state. The system speaks in the first layers of a prompt only, which nothing stored reaches."""
