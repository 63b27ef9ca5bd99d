"""Routes of the operations: inputs of a request, and the response.

A body is read up to a bound, and refused before it is read if its length is declared. A JSON body needs the media type
`application/json`. Where an application finds the user, by a cookie for instance, a page of another origin can change
nothing: see `check_browser_origin`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, Final, get_args, get_origin
from urllib.parse import parse_qsl, quote

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...queues.errors import PerdureError
from ...queues.json_form import finite_json
from ..log import logger
from .guards import check_browser_origin
from .operation import OPERATIONS, Call, Download, EventStream, Operation
from .problems import MEDIA_TYPE, Problem, invalid, problem_of
from .service import Service
from .users import User

_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

_PING: Final = 15
"""Seconds between two comments of an event stream, which keep proxies from closing it."""

_CANCEL_AGAIN: Final = 0.5
"""Seconds after which an operation that does not end is cancelled again."""

_MAX_FIELDS: Final = 5_000
"""Fields of a form at most."""

_BODY_TIMEOUT: Final = 60.0
"""Seconds within which a body must arrive."""

_MAX_DISCARDED: Final = 128 << 20
_DISCARD_TIMEOUT: Final = 5.0
"""Bytes of a body that is refused, and seconds for them, that are read so that the client gets the response."""

_CLIENT_GONE: Final = 499
"""Status, in logs of proxies, of a request whose client has closed the connection."""

_SEND_TIMEOUT: Final = 30.0
"""Seconds after which the stream of a client that reads nothing is closed."""

_ANONYMOUS: Final = User("anonymous", ())


def routes(service: Service) -> list[Route]:
    """Return one route for each operation, in an order in which fixed paths come before those with parameters."""
    ordered = sorted(OPERATIONS.values(), key=lambda known: [part.startswith("{") for part in known.path.split("/")])
    return [Route(known.path, _endpoint(service, known), methods=[known.method], name=known.name) for known in ordered]


def _endpoint(service: Service, known: Operation[Any, Any]) -> Any:
    async def endpoint(request: Request) -> Response:
        try:
            return await _answer(service, known, request)
        except Problem as problem:
            return problem_response(problem)
        except PerdureError as error:
            return problem_response(problem_of(error))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:  # noqa: BLE001 - its text may hold data, so it goes to the log only
            logger.exception("{} {} failed: {}", request.method, known.path, type(error).__name__)
            return problem_response(
                Problem(500, "server-error", "the server failed; its log has the traceback", source="server")
            )

    return endpoint


async def _answer(service: Service, known: Operation[Any, Any], request: Request) -> Response:
    if service.authenticate is not None:
        check_browser_origin(request)
    user = await service.user_of(request)
    if user is None and known.roles:
        raise Problem(
            401,
            "token-needed",
            "send a token: Authorization: Bearer TOKEN",
            headers={"WWW-Authenticate": "Bearer"},
        )
    user = user or _ANONYMOUS
    service.check_running(user)
    with service.running(user):
        given = await read_inputs(known, request, service.max_body)
        base = f"{request.url.scheme}://{request.url.netloc}{request.scope.get('root_path', '').rstrip('/')}"
        result = await _run(known, service.call(user, base), given, request)
    if isinstance(result, EventStream):
        sent = _sent(result, service, user, request)
        return _EventResponse(sent, ping=_PING, headers=_HEADERS, send_timeout=_SEND_TIMEOUT)
    return _response(known, result)


async def _run(known: Operation[Any, Any], call: Call, given: BaseModel, request: Request) -> Any:
    """Run an operation. One that only reads, and may wait, ends when the client goes."""
    if known.changes or known.method != "GET":
        return await known(call, given)
    running = asyncio.ensure_future(known(call, given))
    leaving = asyncio.ensure_future(_client_gone(request))
    try:
        await asyncio.wait((running, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnect
        return running.result()
    finally:
        while not (running.done() and leaving.done()):  # asyncio.wait_for may swallow a cancellation up to Python 3.11
            running.cancel()
            leaving.cancel()
            await asyncio.wait((running, leaving), timeout=_CANCEL_AGAIN)


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_inputs(known: Operation[Any, Any], request: Request, max_body: int) -> BaseModel:
    """Read and validate the inputs of an operation from a request.

    Raises:
        Problem: An input is not valid, unknown or missing, or the body is too large.
    """
    inputs: dict[str, Any] = {}
    outer = {name: (place, name_outside) for name, (place, name_outside) in known.places.items()}
    queried = {name for name, (place, _) in outer.items() if place == "query"}
    if unknown := sorted(set(request.query_params) - queried):
        listed = ", ".join(sorted(queried)) or "none"
        raise Problem(422, "invalid-input", f"query parameter {unknown[0]!r} is unknown; known: {listed}")
    if known.has_body:
        inputs.update(await _read_body(request, max_body))
    for name, (place, name_outside) in outer.items():
        if place == "body":
            continue
        inputs.pop(name, None)
        if place == "path":
            inputs[name] = request.path_params[name]
        elif place == "header":
            if name_outside in request.headers:
                inputs[name] = request.headers[name_outside]
        elif name in request.query_params:
            several = request.query_params.getlist(name)
            inputs[name] = several if _takes_list(known, name) else several[-1]
    try:
        found: BaseModel = known.inputs.model_validate(inputs)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_context=False, include_input=False)) from None
    return found


def _takes_list(known: Operation[Any, Any], name: str) -> bool:
    """Return whether an input is a list, which a query gives by naming it several times."""
    annotation = known.inputs.model_fields[name].annotation
    kinds = [annotation, *get_args(annotation)]
    return any((get_origin(kind) or kind) in (list, tuple, set, frozenset) for kind in kinds)


async def _read_body(request: Request, limit: int) -> dict[str, Any]:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await read_bytes(request, limit)
    if not body:
        return {}
    if media_type != "application/json":
        raise Problem(415, "media-type", f"the body must be application/json, got {media_type or 'no media type'!r}")
    try:
        found = from_json(body, allow_inf_nan=False)
        finite_json(found, "it")
    except ValueError as error:
        raise Problem(400, "not-json", f"the body must be JSON: {error}") from None
    if not isinstance(found, dict):
        raise Problem(422, "invalid-input", f"the body must be a JSON object, got {type(found).__name__}")
    return found


async def read_bytes(request: Request, limit: int) -> bytes:
    """Read the body of a request, up to a limit.

    Raises:
        Problem: It is larger, or its declared length is, or it arrives too slowly.
    """
    refused = Problem(
        413, "body-too-large", f"the body must have at most {limit} bytes", headers={"Connection": "close"}
    )
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        await _discard(request)
        raise refused
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    break
                parts.append(part)
    except TimeoutError:
        raise Problem(
            408,
            "body-too-slow",
            f"the body must arrive within {_BODY_TIMEOUT:g} seconds",
            headers={"Connection": "close"},
        ) from None
    if size > limit:
        parts.clear()
        await _discard(request)
        raise refused
    return b"".join(parts)


async def _discard(request: Request) -> None:
    """Read the rest of a body that is refused, up to a bound, and keep nothing of it.

    If a connection is closed while the client sends, most clients report that in place of the response. One that waits
    for leave to send (`Expect: 100-continue`) gets the response at once.
    """
    if "expect" in request.headers:
        return
    left = _MAX_DISCARDED
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_TIMEOUT):
            async for part in request.stream():
                left -= len(part)
                if left < 0:
                    return


def parse_form(body: bytes) -> dict[str, list[str]]:
    """Return the fields of a form of the media type `application/x-www-form-urlencoded`.

    Raises:
        Problem: It has too many fields.
    """
    try:
        pairs = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise Problem(422, "invalid-form", f"the form must have at most {_MAX_FIELDS} fields") from None
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value.replace("\r\n", "\n"))  # browsers send both for a line break
    return found


def problem_response(problem: Problem) -> Response:
    """Return the response of a problem."""
    headers = _HEADERS | problem.headers
    return Response(problem.view().model_dump_json(), problem.status, headers, MEDIA_TYPE)


def _response(known: Operation[Any, Any], result: Any) -> Response:
    if isinstance(result, Download):
        return download_response(result)
    if result is None:
        return Response(status_code=known.status if known.status == 204 else 204, headers=_HEADERS)
    data = TypeAdapter(known.result).dump_json(result)
    return Response(data, known.status, _HEADERS, "application/json")


def download_response(download: Download) -> Response:
    """Return a response that sends a file, which browsers store and do not show."""
    headers = _HEADERS | {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(download.name, safe='')}"}
    return StreamingResponse(_chunks(download), headers=headers, media_type=download.media_type)


class _EventResponse(EventSourceResponse):
    """An event stream, which ends for a client that reads nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            logger.info(
                "closed the event stream {}: its client has read nothing for {} s", scope["path"], _SEND_TIMEOUT
            )


async def _sent(stream: EventStream, service: Service, user: User, request: Request) -> AsyncIterator[ServerSentEvent]:
    """Yield the frames of a stream as events, until the token of the user is removed or gets other roles."""
    after = None
    with service.running(user):
        async with aclosing(stream.frames) as frames:
            async for frame in frames:
                if not await service.is_still(user, request):
                    ended = Problem(401, "unknown-token", "the token is not valid any more: the stream ends")
                    yield ServerSentEvent(ended.view().model_dump_json(), event="error", id=after)
                    return
                yield ServerSentEvent(frame.data.decode(errors="replace"), event=frame.event, id=frame.id)
                after = frame.id


async def _chunks(download: Download) -> AsyncIterator[bytes]:
    async with aclosing(download.chunks) as chunks:
        async for chunk in chunks:
            yield chunk
