"""An audit of Python code, one file at a time: what `perdure demo` gives its workers to do.

Nothing here knows of tasks or of Redis. What is said of a file depends on nothing but the file, so that a step that
is run again says the same again. No file is ever imported or run, and one that cannot be parsed is a finding, not an
error.
"""

from __future__ import annotations

import ast
import io
import threading
import tokenize
import warnings
from pathlib import Path

from .models import FileAudit, Finding, FindingKind, shorten
from .walk import Walk, count_lines

__all__ = ["audit_file"]


def audit_file(root: str, path: str) -> FileAudit:
    """Measure one file, named as `list_files` names it.

    A file that cannot be read, decoded (by the rules of `tokenize.open`) or parsed yields an audit with that
    one finding. Warnings about the code are suppressed.
    """
    try:
        data = Path(root, path).read_bytes()
    except OSError as error:
        return _unread(path, b"", FindingKind.UNREADABLE, 1, error.strerror or type(error).__name__)
    try:
        tree = _parse(data)
    except _ParseError as refusal:
        return _unread(path, data, refusal.kind, refusal.line, refusal.reason)
    return Walk(path).audit(tree, data)


def _unread(path: str, data: bytes, kind: FindingKind, line: int, detail: str) -> FileAudit:
    return FileAudit(
        path=path,
        bytes=len(data),
        lines=count_lines(data),
        findings=(Finding(kind=kind, path=path, line=line, detail=shorten(detail)),),
        counts={kind: 1},
    )


class _ParseError(Exception):
    def __init__(self, kind: FindingKind, line: int | None, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.line = line or 1
        self.reason = reason


# Filters of warnings belong to the process: two threads inside `catch_warnings` would restore each other's.
# Nothing is lost by taking turns, as the parser holds the GIL anyway.
_filtering_warnings = threading.Lock()


def _parse(data: bytes) -> ast.Module:
    with _filtering_warnings, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = _decode(data)
        try:
            return ast.parse(text)
        except SyntaxError as error:
            raise _ParseError(FindingKind.SYNTAX_ERROR, error.lineno, error.msg) from None
        except ValueError as error:  # null bytes before 3.11.4; lone surrogates out of an escaping codec
            raise _ParseError(FindingKind.SYNTAX_ERROR, None, str(error)) from None
        except (RecursionError, MemoryError):
            reason = "nested too deeply for Python's parser"
            raise _ParseError(FindingKind.TOO_DEEP, None, reason) from None


def _decode(data: bytes) -> str:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = count_lines(error.object[: error.start] + b".")
        offending = error.object[error.start : error.start + 1].hex()
        reason = f"not {error.encoding}: {error.reason} (0x{offending})"
        raise _ParseError(FindingKind.UNDECODABLE, line, reason) from None
    except (SyntaxError, LookupError, ValueError) as error:  # a wrong declaration, a codec for no text
        raise _ParseError(FindingKind.UNDECODABLE, None, str(error)) from None
