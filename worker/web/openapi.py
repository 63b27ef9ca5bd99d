"""The OpenAPI 3.1 document of the operations, from the models that validate their inputs and results."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from .operation import OPERATIONS, Download, EventStream, Operation
from .problems import MEDIA_TYPE, ProblemView

_TEMPLATE: Final = "#/components/schemas/{model}"
_PROBLEMS: Final = {
    "400": "The body is not JSON.",
    "401": "The token is missing or not known.",
    "403": "The user lacks the role.",
    "404": "There is no such thing.",
    "409": "What is stored does not allow it.",
    "410": "It is not kept any more.",
    "413": "The body or a value is too large.",
    "415": "The body has another media type than application/json.",
    "422": "An input is not valid.",
    "429": "As many wait as the limit allows.",
    "500": "The server failed, or stored data cannot be read.",
    "501": "Newer code than that of the server is needed.",
    "502": "Redis refuses the user of the server, or a command.",
    "503": "Redis is unreachable.",
    "504": "Too few replicas of Redis have it in time.",
    "507": "Redis is full.",
}


def document(version: str, base: str = "") -> dict[str, Any]:
    """Return the OpenAPI document. base: path under which the API is mounted."""
    schemas: dict[str, Any] = {}
    problem = _schema(ProblemView, schemas)
    content = {MEDIA_TYPE: {"schema": problem}}
    responses = {code: {"description": text, "content": content} for code, text in _PROBLEMS.items()}
    paths: dict[str, Any] = {}
    for known in sorted(OPERATIONS.values(), key=lambda known: (known.path, known.method)):
        paths.setdefault(known.path, {})[known.method.lower()] = _operation(known, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Perdure", "version": version, "description": _INTRODUCTION},
        "servers": [{"url": base or "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {f"Problem{code}": response for code, response in responses.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


_INTRODUCTION: Final = (
    "Tasks of a Perdure deployment. Errors are problem details (RFC 9457); their member `source` tells an error of the "
    "request from one of the task, of Redis and of the server."
)

_FRAME: Final = {
    "type": "object",
    "description": "A server-sent event.",
    "properties": {
        "id": {"type": "string", "description": "Cursor that continues the stream behind the frame."},
        "event": {"type": "string", "description": "Kind of the frame."},
        "data": {"description": "JSON."},
    },
}


def _operation(known: Operation[Any, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    summary, _, text = known.description.partition("\n")
    model = known.inputs.model_json_schema(ref_template=_TEMPLATE)
    schemas.update(model.pop("$defs", {}))
    required = set(model.get("required", ()))
    parameters: list[dict[str, Any]] = []
    body: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    for name, (place, outer) in known.places.items():
        schema = {key: value for key, value in model["properties"][name].items() if not key.startswith("x-")}
        if place == "body":
            body["properties"][name] = schema
            if name in required:
                body.setdefault("required", []).append(name)
            continue
        description = schema.pop("description", "")
        parameters.append(
            {
                "name": outer,
                "in": place,
                "required": place == "path" or name in required,
                "description": description,
                "schema": schema,
            }
        )
    roles = f"\n\nRoles: {', '.join(known.roles)}." if known.roles else "\n\nNo token is needed."
    found: dict[str, Any] = {
        "operationId": known.name,
        "summary": summary.rstrip("."),
        "description": text.strip() + roles,
        "tags": [known.tag],
        "parameters": parameters,
        "responses": _responses(known, schemas),
    }
    if not known.roles:
        found["security"] = []
    if known.has_body:
        found["requestBody"] = {"required": "required" in body, "content": {"application/json": {"schema": body}}}
    return found


def _responses(known: Operation[Any, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {code: {"$ref": f"#/components/responses/Problem{code}"} for code in _PROBLEMS}
    success: dict[str, Any] = {"description": "Done."}
    if known.result is EventStream:
        success["content"] = {"text/event-stream": {"schema": _FRAME}}
    elif known.result is Download:
        success["content"] = {"*/*": {}}
    elif known.result is not None and known.result is not type(None):
        success["content"] = {"application/json": {"schema": _schema(known.result, schemas)}}
    return {str(known.status): success} | found


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a result, with its models among the components."""
    found = TypeAdapter(kind).json_schema(mode="serialization", ref_template=_TEMPLATE)
    schemas.update(found.pop("$defs", {}))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        schemas[kind.__name__] = found
        return {"$ref": _TEMPLATE.format(model=kind.__name__)}
    return found
