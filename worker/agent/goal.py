"""The id of an agent's task: the same for the same goal, so that a goal is worked for once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

__all__ = ["goal_id"]


def goal_id(agent: str, key: str | None, arguments: Mapping[str, Any]) -> str:
    """The task id of a goal. key: the caller's name for it; else it is known by its arguments, which are JSON data
    without secrets.
    """
    known: list[Any] = [agent, "goal", dict(arguments)] if key is None else [agent, "key", key]
    data = orjson.dumps(known, option=orjson.OPT_SORT_KEYS)
    return f"goal-{hashlib.sha256(data).hexdigest()[:40]}"
