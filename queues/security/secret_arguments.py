"""Secret arguments: their paths, their unwrapping when a task is enqueued, and their masking when it is shown.

The envelope stores the paths of secrets (`secrets`), since tools that show a task do not have the handler's code. A
path is a tuple of names from the arguments' object down; `*` matches every item of an array or member of an object.

pydantic writes a secret (`SecretStr`, `SecretBytes`, `Secret`) as asterisks into JSON. A handler needs the value, so
`unwrap_secrets` walks the value and its JSON form in parallel and puts the secrets back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

import orjson
from pydantic import BaseModel, Secret, SecretBytes, SecretStr
from pydantic_core import from_json, to_json, to_jsonable_python

SecretPath = tuple[str, ...]
SecretPaths = tuple[SecretPath, ...]

MASK: Final = "**********"
"""The text that pydantic shows for a secret."""

_MASK_BYTES: Final = MASK.encode()

ANY: Final = "*"

EVERYTHING: Final[SecretPaths] = ((),)
"""The path of the arguments as a whole."""

MAX_SECRET_PATHS: Final = 100
DEEPEST: Final = 30
"""Names in a path. A longer path is cut, which masks the value around the secret."""


SECRET: Final = (SecretStr, SecretBytes, Secret)
"""The types of secret values."""


def read_secret_paths(envelope: bytes) -> SecretPaths:
    """Return the paths in an envelope, even if its version is not supported otherwise."""
    try:
        found = orjson.loads(envelope).get("secrets", ())
        return bounded([tuple(str(name) for name in path) for path in found])
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        return ()


def bounded(paths: Sequence[SecretPath]) -> SecretPaths:
    """Return paths that fit into an envelope and mask at least as much."""
    if len(paths) > MAX_SECRET_PATHS:
        return EVERYTHING
    return tuple(dict.fromkeys(path[:DEEPEST] for path in paths))


def mask(arguments: bytes, paths: SecretPaths) -> bytes:
    """Return the arguments without their secrets. Text that is not JSON, or nested too deeply, is masked as a whole."""
    if not paths:
        return arguments
    try:
        data = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return orjson.dumps(MASK)
    for path in paths:
        data = _apply_at(data, path, lambda value: value if value is None else MASK)
    try:
        return orjson.dumps(data)
    except TypeError:  # orjson reads deeper JSON than it writes
        return orjson.dumps(MASK)


def contains_mask(data: bytes) -> bool:
    """Whether JSON may contain a masked secret."""
    return _MASK_BYTES in data


def restore_masked(edited: bytes, former: Callable[[], bytes], paths: SecretPaths) -> bytes:
    """Return edited arguments with each mask replaced by the value it stands for.

    Args:
        former: returns the arguments before the edit; called only if there is a mask.
    """
    if not paths or not contains_mask(edited):
        return edited
    try:  # unlike orjson, pydantic_core keeps large integers exact
        data, before = from_json(edited), from_json(former())
        for path in paths:
            data = _restore_at(data, before, path)
        return to_json(data)
    except ValueError:
        return edited


def path_exists(arguments: Any, path: SecretPath) -> bool:
    """Whether decoded arguments have a value at a path, or are null or empty where the rest of the path would be."""
    if not path or arguments is None:
        return True
    name, rest = path[0], path[1:]
    if isinstance(arguments, dict):
        values = list(arguments.values()) if name == ANY else [arguments[name]] if name in arguments else None
    else:
        values = arguments if isinstance(arguments, list) and name == ANY else None
    return values is not None and (not values or any(path_exists(value, rest) for value in values))


def names_beside(arguments: Any, path: SecretPath) -> list[str]:
    """Return the names that decoded arguments have where a path leaves them, with dots as in the command line."""
    inside = max(length for length in range(len(path)) if path_exists(arguments, path[:length]))
    found: dict[str, None] = {}
    for parent in _values_at(arguments, path[:inside]):
        names = parent if isinstance(parent, dict) else [ANY] if isinstance(parent, list) else []
        found |= dict.fromkeys(".".join((*path[:inside], name)) for name in names)
    return list(found)


def secret_values(arguments: bytes, paths: SecretPaths) -> list[str]:
    """Return the secrets among the arguments as text."""
    found: list[str] = []
    try:
        data = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return found
    for path in paths:
        for value in _values_at(data, path):
            found += _strings_in(value)
    return found


def _apply_at(data: Any, path: Sequence[str], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(data)
    name, rest = path[0], path[1:]
    if isinstance(data, dict):
        return {key: _apply_at(value, rest, change) if name in (ANY, key) else value for key, value in data.items()}
    if isinstance(data, list) and name == ANY:
        return [_apply_at(value, rest, change) for value in data]
    return data


def _restore_at(data: Any, before: Any, path: Sequence[str]) -> Any:
    if not path:
        return before if data == MASK else data
    name, rest = path[0], path[1:]
    if isinstance(data, dict) and isinstance(before, dict):
        return {
            key: _restore_at(value, before[key], rest) if name in (ANY, key) and key in before else value
            for key, value in data.items()
        }
    if isinstance(data, list) and isinstance(before, list) and name == ANY:
        kept = [_restore_at(value, former, rest) for value, former in zip(data, before, strict=False)]
        return kept + data[len(kept) :]
    return data


def _values_at(data: Any, path: Sequence[str]) -> Iterator[Any]:
    if not path:
        yield data
    elif isinstance(data, dict):
        for key, value in data.items():
            if path[0] in (ANY, key):
                yield from _values_at(value, path[1:])
    elif isinstance(data, list) and path[0] == ANY:
        for value in data:
            yield from _values_at(value, path[1:])


def _strings_in(value: Any) -> Iterator[str]:
    """Yield every string and number within a secret value."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += reversed(one.values())
        elif isinstance(one, list):
            left += reversed(one)
        elif one is not None and not isinstance(one, bool):
            yield str(one)


def schema_secrets(schema: Any) -> SecretPaths:
    """Return the paths that a JSON schema of arguments marks as `writeOnly`, as pydantic marks secrets.

    References lead within the document only; the paths of a schema that refers to itself end after a few rounds.
    """
    found: dict[SecretPath, None] = {}
    left: list[tuple[Any, SecretPath, int]] = [(schema, (), 0)]
    seen = 0
    while left and seen < _SCHEMA_PARTS:
        part, path, rounds = left.pop()
        seen += 1
        if not isinstance(part, dict) or rounds > _ROUNDS:
            continue
        if part.get("writeOnly") is True:
            found[path] = None
            continue
        if isinstance(name := part.get("$ref"), str) and name.startswith("#/$defs/"):
            definitions = schema.get("$defs")
            target = definitions.get(name.removeprefix("#/$defs/")) if isinstance(definitions, dict) else None
            left.append((target, path, rounds + 1))
        if isinstance(members := part.get("properties"), dict):
            left += [(below, (*path, str(name)), rounds) for name, below in members.items()]
        left += [(part.get(name), (*path, ANY), rounds) for name in ("items", "additionalProperties")]
        for name, deeper in (("prefixItems", (ANY,)), ("anyOf", ()), ("oneOf", ()), ("allOf", ())):
            if isinstance(parts := part.get(name), list):
                left += [(below, (*path, *deeper), rounds) for below in parts]
    return bounded(list(found))


_SCHEMA_PARTS: Final = 10_000
_ROUNDS: Final = 5
"""Parts of a schema that are searched, and references on the way to one."""


def has_secret(schema: Any) -> bool:
    """Whether a core schema of pydantic contains a secret type."""
    left, seen = [schema], set()
    while left:
        part = left.pop()
        if isinstance(part, type):
            if issubclass(part, SECRET):
                return True
        elif isinstance(part, (dict, list, tuple)) and id(part) not in seen:
            seen.add(id(part))
            left += part.values() if isinstance(part, dict) else part
    return False


def unwrap_secrets(value: Any, shown: Any) -> tuple[Any, SecretPaths]:
    """Return the JSON form of a value with its secrets unwrapped, and their paths.

    Args:
        shown: the JSON form with masks.

    Raises:
        ValueError: secret bytes are not UTF-8.
    """
    paths: dict[SecretPath, None] = {}
    data = _unwrap(value, shown, (), paths)
    return data, bounded(list(paths))


def _unwrap(value: Any, shown: Any, path: SecretPath, paths: dict[SecretPath, None]) -> Any:
    from pydantic import RootModel  # adds 5 ms to the start of a process; few have secret arguments

    if isinstance(value, SECRET):
        inner = value.get_secret_value()
        if inner is not None:
            paths[path] = None
        return _unwrap(inner, to_jsonable_python(inner), path, paths)
    if isinstance(value, RootModel):
        return _unwrap(value.root, shown, path, paths)
    if isinstance(shown, dict):
        return _unwrap_members(value, shown, path, paths)
    if isinstance(shown, list) and isinstance(value, Sequence | AbstractSet) and len(shown) == len(value):
        return [_unwrap(one, seen, (*path, ANY), paths) for one, seen in zip(value, shown, strict=True)]
    return shown


def _unwrap_members(
    value: Any, shown: dict[str, Any], path: SecretPath, paths: dict[SecretPath, None]
) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        aliases = {name: field.serialization_alias or field.alias or name for name, field in fields.items()}
        members = {name: getattr(value, name) for name in fields} | (value.model_extra or {})
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        aliases = {}
        members = {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}
    elif isinstance(value, Mapping) and len(value) == len(shown):
        whole = isinstance(value, dict) and not path  # the arguments themselves: their names are known
        return {
            name: _unwrap(one, seen, (*path, name if whole else ANY), paths)
            for (name, seen), one in zip(shown.items(), value.values(), strict=True)
        }
    else:
        return shown
    unwrapped = dict(shown)
    for name, one in members.items():
        key = name if name in shown else aliases.get(name, name)
        if key in shown:
            unwrapped[key] = _unwrap(one, shown[key], (*path, key), paths)
    return unwrapped
