"""Errors of recorded failures: what they have of the original, and what is never called or imported for them."""

from __future__ import annotations

import sys
import types
from enum import IntEnum
from typing import Any

import pytest
from perdure import RecordedFailure, StepTimeout
from perdure.worker.durable.steps.recorded_errors import describe, make_error

LIMIT = 64 * 1024

calls: list[str] = []


class Meta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        calls.append("metaclass")
        return super().__call__(*args, **kwargs)


class Code(IntEnum):
    BUSY = 429


class ApiError(Exception, metaclass=Meta):
    status = 500

    def __init__(self, status: int, response: object) -> None:
        calls.append("init")
        super().__init__("api", response)
        self.status = status
        self.response = response
        self.code = Code.BUSY

    def __init_subclass__(cls, **options: object) -> None:
        calls.append("subclass")

    def __str__(self) -> str:
        return f"the API answered {self.status}"

    @property
    def text(self) -> str:
        return str(self.response)


class Moved(OSError):
    def __init__(self) -> None:
        super().__init__(2, "moved", "file.txt")


class Local(ConnectionResetError):
    pass


def recorded(error: BaseException, limit: int = LIMIT) -> Exception:
    return make_error("fetch", *describe(error, limit))


def test_the_original_class_is_matched_without_a_call_of_it() -> None:
    original = ApiError(404, object())
    calls.clear()
    error = recorded(original)
    assert isinstance(error, ApiError)
    assert isinstance(error, RecordedFailure)
    assert not calls
    assert type(error).__name__ == "ApiError"
    assert str(error) == "the API answered 404"
    assert error.status == 404


def test_the_same_class_is_made_once() -> None:
    assert type(recorded(ValueError("a"))) is type(recorded(ValueError("b")))


@pytest.mark.parametrize("name", ["response", "code", "args", "unknown", "text"])
def test_an_attribute_that_was_not_stored_raises_with_the_reason(name: str) -> None:
    """Also one that the class has a default or a property for, which would be another value."""
    error = recorded(ApiError(404, object()))
    with pytest.raises(AttributeError, match="raised from the record of step 'fetch'"):
        getattr(error, name)


@pytest.mark.parametrize(
    "original",
    [
        ValueError("bad", 3, None, 1.5, ["a"]),
        KeyError("name"),
        OSError(111, "refused"),
        FileNotFoundError(2, "no such file", "a.txt"),
        Moved(),
        TimeoutError(),
        StopIteration(7),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        StepTimeout("pay", 3.0),
    ],
    ids=repr,
)
def test_text_repr_and_type_are_the_same(original: Exception) -> None:
    error = recorded(original)
    assert isinstance(error, type(original))
    assert (str(error), repr(error)) == (str(original), repr(original))


def test_attributes_of_built_in_errors_are_kept() -> None:
    error = recorded(Moved())
    assert isinstance(error, OSError)
    assert (error.errno, error.strerror, error.filename) == (2, "moved", "file.txt")
    timeout = recorded(StepTimeout("pay", 3.0))
    assert isinstance(timeout, StepTimeout)
    assert (timeout.step, timeout.seconds) == ("pay", 3.0)


def test_notes_are_kept() -> None:
    original = ValueError("bad")
    original.add_note("in row 3")
    assert recorded(original).__notes__ == ["in row 3"]


def test_a_class_that_is_not_imported_is_replaced_by_its_first_base_that_is() -> None:
    module = types.ModuleType("perdure_test_gone")
    kind = type("GoneError", (Local,), {"__module__": module.__name__})
    text, data = describe(kind("away"), LIMIT)
    assert module.__name__ not in sys.modules
    error = make_error("fetch", text, data)
    assert isinstance(error, Local)
    assert (type(error).__name__, str(error)) == ("GoneError", "away")


def test_a_class_that_is_no_exception_is_not_used() -> None:
    text, data = describe(ValueError("x"), LIMIT)
    data["classes"] = [["os", "system"], ["builtins", "SystemExit"], ["builtins", "int"]]
    error = make_error("fetch", text, data)
    assert isinstance(error, RecordedFailure)
    assert not isinstance(error, SystemExit)
    assert str(error) == "x"


def test_a_group_has_its_members() -> None:
    error = recorded(ExceptionGroup("both", [ValueError("a"), ExceptionGroup("inner", [KeyError("b")])]))
    assert isinstance(error, ExceptionGroup)
    found = error.subgroup(KeyError)
    assert found is not None
    assert isinstance(error.exceptions[0], ValueError)
    assert str(error) == "both (2 sub-exceptions)"


def test_what_is_stored_is_bounded() -> None:
    original = ApiError(404, "x" * LIMIT)
    original.big, original.small = "y" * LIMIT, "z"  # type: ignore[attr-defined]
    text, data = describe(original, LIMIT)
    error = make_error("fetch", text, data)
    assert error.small == "z"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        _ = error.big  # type: ignore[attr-defined]
    text, _ = describe(ValueError("é" * LIMIT), LIMIT)
    assert len(text.encode()) < LIMIT // 4 + 100
    assert text.endswith("bytes were cut)")


def test_half_of_a_surrogate_pair_does_not_prevent_the_record() -> None:
    assert "?" in str(recorded(ValueError("\ud83d")))


def test_a_broken_str_or_repr_does_not_prevent_the_record() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

        def __repr__(self) -> str:
            raise SystemExit

    assert "no message" in str(recorded(BrokenError()))
