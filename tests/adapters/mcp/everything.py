"""App whose tasks are the tools that the scenarios of the conformance suite of MCP name."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from perdure import App, Context, Retry
from perdure.integrations.mcp import ToolOptions, ToolResult, ToolSelection
from pydantic import BaseModel, Field

app = App("everything")

ONCE = Retry(max_attempts=1)

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
SOUND = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAA="


def choices(value: str, title: str) -> list[dict[str, str]]:
    """Return three choices with titles."""
    return [{"const": f"{value}{number}", "title": f"{title} {number}"} for number in (1, 2, 3)]


class UserName(BaseModel):
    name: str


class Confirmation(BaseModel):
    confirm: bool


class Step1(BaseModel):
    name: str


class Step2(BaseModel):
    color: str


class Ok(BaseModel):
    ok: bool


class Account(BaseModel):
    username: str = Field(description="User's response")
    email: str = Field(description="User's email address")


class Choice(BaseModel):
    name: str = "John Doe"
    age: int = 30
    score: float = 95.5
    status: str = Field("active", json_schema_extra={"enum": ["active", "inactive", "pending"]})
    verified: bool = True


# tools of the protocol


@app.task(retry=ONCE)
async def test_simple_text(ctx: Context) -> ToolResult:
    """Return a text."""
    return ToolResult.text("This is a simple text response for testing.")


@app.task(retry=ONCE)
async def test_image_content(ctx: Context) -> ToolResult:
    """Return an image."""
    return ToolResult(content=[{"type": "image", "data": PIXEL, "mimeType": "image/png"}])


@app.task(retry=ONCE)
async def test_audio_content(ctx: Context) -> ToolResult:
    """Return a sound."""
    return ToolResult(content=[{"type": "audio", "data": SOUND, "mimeType": "audio/wav"}])


@app.task(retry=ONCE)
async def test_embedded_resource(ctx: Context) -> ToolResult:
    """Return a resource."""
    resource = {"uri": "test://embedded-resource", "mimeType": "text/plain", "text": "This is an embedded resource."}
    return ToolResult(content=[{"type": "resource", "resource": resource}])


@app.task(retry=ONCE)
async def test_multiple_content_types(ctx: Context) -> ToolResult:
    """Return a text, an image and a resource."""
    text = '{"test":"data","value":123}'
    resource = {"uri": "test://mixed-content-resource", "mimeType": "application/json", "text": text}
    return ToolResult(
        content=[
            {"type": "text", "text": "Multiple content types test:"},
            {"type": "image", "data": PIXEL, "mimeType": "image/png"},
            {"type": "resource", "resource": resource},
        ]
    )


@app.task(retry=ONCE)
async def test_error_handling(ctx: Context) -> str:
    """Fail."""
    raise ValueError("This tool intentionally returns an error for testing")


@app.task(retry=ONCE)
async def test_tool_with_progress(ctx: Context) -> str:
    """Report progress three times."""
    for done in (0, 50, 100):
        await ctx.progress(done, 100)
        await ctx.step(f"wait-{done}", asyncio.sleep, 0.05)
    return "done"


@app.task(retry=ONCE)
async def test_elicitation(ctx: Context, message: str) -> str:
    """Ask for an account."""
    account = await ctx.wait_for("account", Account, why=message)
    return f"User response: {account.model_dump_json()}"


@app.task(retry=ONCE)
async def test_elicitation_sep1034_defaults(ctx: Context) -> str:
    """Ask with defaults."""
    return f"Elicitation completed: {await ctx.wait_for('choice', Choice, why='Choose.')}"


class Choices(BaseModel):
    """The forms of choices of SEP-1330."""

    untitledSingle: Literal["option1", "option2", "option3"] = "option1"  # noqa: N815
    titledSingle: str = Field("value1", json_schema_extra={"oneOf": choices("value", "Option")})  # noqa: N815
    legacyEnum: str = Field(  # noqa: N815
        "opt1", json_schema_extra={"enum": ["opt1", "opt2"], "enumNames": ["Option One", "Option Two"]}
    )
    untitledMulti: list[Literal["option1", "option2", "option3"]] = []  # noqa: N815
    titledMulti: list[str] = Field([], json_schema_extra={"items": {"anyOf": choices("value", "Choice")}})  # noqa: N815


@app.task(retry=ONCE)
async def test_elicitation_sep1330_enums(ctx: Context) -> str:
    """Ask with choices."""
    return f"Elicitation completed: {await ctx.wait_for('choices', Choices, why='Choose.')}"


@app.task(retry=ONCE)
async def route(ctx: Context, region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})]) -> str:
    """Take an argument that the client repeats in a header."""
    return region


# questions within a call


@app.task(retry=ONCE)
async def test_input_required_result_elicitation(ctx: Context) -> str:
    """Ask for a name."""
    return f"Hello, {(await ctx.wait_for('user_name', UserName, why='What is your name?')).name}"


@app.task(retry=ONCE)
async def test_input_required_result_request_state(ctx: Context) -> ToolResult:
    """Ask for a confirmation."""
    await ctx.wait_for("confirm", Ok, why="Please confirm")
    return ToolResult.text("state-ok")


@app.task(retry=ONCE)
async def test_input_required_result_tampered_state(ctx: Context) -> str:
    """Ask for a confirmation."""
    return str(await ctx.wait_for("confirm", Ok, why="Please confirm"))


@app.task(retry=ONCE)
async def test_input_required_result_multi_round(ctx: Context) -> str:
    """Ask twice."""
    name = await ctx.wait_for("step1", Step1, why="Step 1: What is your name?")
    color = await ctx.wait_for("step2", Step2, why="Step 2: What is your favorite color?")
    return f"{name.name} likes {color.color}"


# the tasks extension


@app.task(retry=ONCE)
async def greet(ctx: Context, name: str) -> ToolResult:
    """Greet."""
    return ToolResult.text(f"Hello, {name}!")


@app.task(retry=ONCE)
async def slow_compute(ctx: Context, seconds: float, label: str = "") -> str:
    """Sleep for some seconds."""
    await ctx.sleep(seconds)
    return f"computed {label}"


@app.task(retry=ONCE)
async def failing_job(ctx: Context) -> str:
    """Fail after a second."""
    await ctx.sleep(1)
    raise ValueError("the job failed")


@app.task(retry=ONCE)
async def protocol_error_job(ctx: Context) -> Any:
    """Return what cannot be stored, which is no fault of the tool."""
    return object()


@app.task(retry=ONCE)
async def confirm_delete(ctx: Context, filename: str) -> str:
    """Ask for a confirmation."""
    confirmed = await ctx.wait_for("confirm", Confirmation, why=f"Delete {filename}?")
    return f"deleted: {confirmed.confirm}"


@app.task(retry=ONCE)
async def multi_input(ctx: Context) -> str:
    """Ask two questions at once."""
    first, second = await asyncio.gather(
        ctx.wait_for("first", Confirmation, why="First?"), ctx.wait_for("second", UserName, why="Second?")
    )
    return f"{first} {second}"


@app.task(retry=ONCE)
async def test_tool_with_task(ctx: Context) -> str:
    """Ask for a name in the call, and go on as a task."""
    name = await ctx.wait_for("user_name", UserName, why="What is your name?")
    await ctx.sleep(0.2)
    return f"Hello, {name.name}"


AT_ONCE = ToolOptions(wait=0)
SELECTION = ToolSelection(
    options={
        "greet": ToolOptions(task="forbidden"),
        "slow_compute": AT_ONCE,
        "failing_job": ToolOptions(task="required", wait=0),
        "protocol_error_job": AT_ONCE,
        "confirm_delete": AT_ONCE,
        "multi_input": AT_ONCE,
        "test_tool_with_task": ToolOptions(task="required", wait=30, questions="call"),
    }
)
