"""Text of pydantic's validation errors, without the values, which may be secret."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_core import ErrorDetails


def first_problem(error: ValidationError) -> str:
    """Return the first problem of an error: `FIELD: TEXT`, or its text alone if it is of the whole value."""
    return describe_problem(error.errors(include_url=False, include_input=False)[0])


def describe_problem(problem: ErrorDetails) -> str:
    """Return one problem of an error, see `first_problem`."""
    where = ".".join(str(part) for part in problem["loc"])
    what = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {what}" if where else what
