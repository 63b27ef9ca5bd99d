"""The arguments of a task: bound by its handler's signature, validated and serialised by its annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NotRequired, get_origin, get_type_hints

from pydantic import ConfigDict, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, from_json, to_json
from typing_extensions import TypedDict

from ..queues.defaults import nearest
from ..queues.security.secret_arguments import SecretPaths, contains_mask, has_secret, secret_values, unwrap_secrets
from ..queues.unique import Unique, UniqueTask
from ..queues.wording import listed
from .durable.json_types import JsonType, storable, type_problem
from .durable.value_loss import find_misread, warn_of_losses
from .errors import InvalidArguments, TaskDefinitionError, describe_problem

if TYPE_CHECKING:
    from ..queues.budgets.definition import TaskBudgets
    from ..queues.limits.task_limits import TaskLimits

CALL_OPTIONS: Final = (
    "delay",
    "queue",
    "key",
    "task_id",
    "tenant",
    "headers",
    "timeout",
    "max_attempts",
    "result_ttl",
    "expires",
    "durability",
    "tags",
    "unique",
    "costs",
    "priority",
    "idle",
    "max_depth",
    "when_full",
    "wait_limit",
)
"""Options of one call of a task, see `Task.options`."""

CALL_WORDS: Final[Mapping[str, str]] = {
    "countdown": "delay",
    "eta": "delay",
    "job_id": "task_id",
    "max_retries": "max_attempts",
    "retries": "max_attempts",
    "retry": "max_attempts",
    "ttl": "result_ttl",
}
"""Names of these options elsewhere."""


class Arguments:
    """The arguments of one handler: bound by its signature, validated and serialised by their annotations."""

    def __init__(self, name: str, handler: Callable[..., Any], call_options: Collection[str] = CALL_OPTIONS) -> None:
        """call_options: options that its calls have, for the text of errors."""
        self._name = name
        self._call_options = call_options
        parameters = list(inspect.signature(handler).parameters.values())
        if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
            raise TaskDefinitionError(f"task {name!r}: the first parameter must be the Context: async def f(ctx, ...)")
        declared = type_hints(name, handler).get(parameters[0].name, object)
        if declared is not object and getattr(get_origin(declared) or declared, "__module__", "") == "builtins":
            raise TaskDefinitionError(
                f"task {name!r}: the first parameter must be the Context, got {parameters[0].name!r}: "
                "async def f(ctx, ...)"
            )
        for parameter in parameters[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise TaskDefinitionError(
                    f"task {name!r}: parameter {str(parameter)!r} must be one that can be passed by name"
                )
        self._signature = inspect.Signature(parameters[1:])
        self._in_order = [one.name for one in parameters[1:] if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        self._type = _arguments_type(name, handler, parameters[1:])
        self._adapter = self._type.adapter
        self.has_secrets = has_secret(self._adapter.core_schema)

    def encode_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bytes, SecretPaths]:
        """Return the arguments of a call as a JSON object, and the paths of its secrets. Raises `InvalidArguments`."""
        try:
            checked = self._type.validate(self._named(args, kwargs))
            data = self._encode(checked)
            secrets: SecretPaths = ()
            if self.has_secrets or contains_mask(data):
                whole, secrets = unwrap_secrets(checked, self._type.plain(checked))
                data = to_json(whole, inf_nan_mode="strings")
        except ValidationError as error:
            raise InvalidArguments(self._name, self._misfit(args, kwargs) or _problem(error)) from None
        except (TypeError, ValueError) as error:
            raise InvalidArguments(self._name, str(error)) from None
        return (data if self._type.is_closed(data) else self._read_back(checked, data)), secrets

    def _read_back(self, checked: dict[str, Any], data: bytes) -> bytes:
        """Return the arguments as JSON that the worker can read.

        Every run has what is read: a `Path` for `str | Path` is text.

        Raises `InvalidArguments` if there is no such JSON, or if the worker would read other models.
        """
        try:
            data, decoded = self._type.read_back(data, checked)
        except ValidationError as error:
            raise InvalidArguments(self._name, f"their JSON cannot be read back: {_problem(error)}") from None
        if self._type.unions:
            for name, value in checked.items():
                misread = find_misread(value, decoded.get(name), (name,), models_only=True)
                if misread is not None:
                    raise InvalidArguments(self._name, str(misread).removeprefix("."))
        if self._type.has_models:
            warn_of_losses(f"arguments of task {self._name!r}", checked, decoded)
        return data

    def _encode(self, checked: dict[str, Any]) -> bytes:
        """Return validated arguments as JSON. Raises `ValueError` that names the argument without a JSON form."""
        try:
            return self._type.write(checked)
        except PydanticSerializationError:
            for name, value in checked.items():
                try:
                    self._type.write({name: value})
                except PydanticSerializationError as error:
                    raise ValueError(f"{name}: {error}; pass JSON data, or declare its type") from None
            raise

    def same(self, data: bytes, other: bytes) -> bool:
        """Whether encoded arguments are equal as values, such as sets whose items are in another order."""
        try:
            return self.decode(data) == self.decode(other)
        except InvalidArguments:
            return False

    def schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the arguments; None for types without one."""
        try:
            return self._adapter.json_schema()
        except PydanticUserError:
            return None

    def bind_unique(self, unique: Unique) -> UniqueTask:
        """Return a rule for unique tasks as that of this task. Raises `ValueError` if these arguments make no key."""
        names = unique.names
        self._check_names("unique key", names or ())
        if names is None and not callable(unique.by):
            if self.has_secrets:
                raise ValueError("unique by all arguments must not have secrets among them; name the others in by=")
            if (unordered := self._unordered()) is not None:
                raise ValueError(
                    f"unique by all arguments must not have sets among them, whose order is open, got {unordered!r}; "
                    "name the others in by="
                )
        return UniqueTask(unique, self._name, self._defaults())

    def bind_limits(self, limits: object) -> TaskLimits | None:
        """Return limits as those of this task, None for an empty list.

        Raises `ValueError`, `TypeError` if these arguments make no key, or a task cannot have such limits.
        """
        if isinstance(limits, (tuple, list)) and not limits:
            return None
        from ..queues.limits.definition import check_limits
        from ..queues.limits.task_limits import TaskLimits

        found = check_limits(limits)
        for limit, _ in found:
            if isinstance(limit.by, tuple):
                self._check_names(f"key of limit {limit.name!r}:", limit.by)
        bound = TaskLimits(found, self._name)
        return TaskLimits(found, self._name, self._defaults()) if bound.keyed else bound

    def bind_budgets(self, budgets: object) -> TaskBudgets | None:
        """Return budgets as those of this task, None for an empty list.

        Raises `ValueError`, `TypeError` if these arguments make no key, or a task cannot have such budgets.
        """
        if isinstance(budgets, (tuple, list)) and not budgets:
            return None
        from ..queues.budgets.definition import TaskBudgets, check_budgets

        found = check_budgets(budgets)
        for budget in found:
            if isinstance(budget.by, tuple):
                self._check_names(f"key of budget {budget.name!r}:", budget.by)
        bound = TaskBudgets(found, self._name)
        return TaskBudgets(found, self._name, self._defaults()) if bound.keyed else bound

    def _check_names(self, what: str, names: Iterable[str]) -> None:
        """Raise `ValueError` for a name in a key that is no argument. what: the key."""
        parameters = self._signature.parameters
        for name in names:
            if name not in parameters:
                known = ", ".join(parameters) or "none"
                raise ValueError(f"{what} {name!r} must be an argument; there are {known}{nearest(name, parameters)}")

    def _unordered(self) -> str | None:
        """Return the name of the first argument that has a set in its type, None without one."""
        schema = self.schema() or {}
        for name, form in schema.get("properties", {}).items():
            if _has_unique_items(form, schema.get("$defs", {}), set()):
                return str(name)
        return None

    def _defaults(self) -> dict[str, Any]:
        """Return the defaults of arguments as JSON data, without those that have none."""
        found: dict[str, Any] = {}
        for name, parameter in self._signature.parameters.items():
            if parameter.default is not parameter.empty:
                with suppress(PydanticSerializationError, ValidationError, ValueError):
                    found |= from_json(self._type.write({name: parameter.default}))
        return found

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, not validated. Raises `InvalidArguments`."""
        try:
            return self._named(args, kwargs)
        except TypeError as error:
            raise InvalidArguments(self._name, str(error)) from None

    def name_of_first(self) -> str:
        """Return the name of the first argument. Raises `InvalidArguments` if it is missing."""
        if not self._in_order:
            raise InvalidArguments(self._name, "it must have an argument for the results of a group")
        return self._in_order[0]

    def check_further(self, kwargs: Mapping[str, Any]) -> None:
        """Check the names of the arguments after the first one. Raises `InvalidArguments`."""
        self.name_of_first()
        if (misfit := self._misfit((None,), kwargs)) is not None:
            raise InvalidArguments(self._name, misfit)

    def secret_values(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the secrets among decoded arguments, as text."""
        whole, secrets = unwrap_secrets(arguments, self._type.plain(dict(arguments)))
        return secret_values(to_json(whole, inf_nan_mode="strings"), secrets)

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name. Raises `TypeError` if there are too many, or one is given twice."""
        if not args:
            return dict(kwargs)
        named = dict(zip(self._in_order, args, strict=False))
        if len(args) > len(self._in_order) or not named.keys().isdisjoint(kwargs):
            self._signature.bind(*args, **kwargs)
        named.update(kwargs)
        return named

    def _misfit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Return Python's error text for a call with too many, too few or unknown arguments."""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = [name for name in kwargs if name not in self._signature.parameters]
            return f"{error}{self.hint(unknown)}"
        return None

    def hint(self, unknown: Iterable[str]) -> str:
        """Return what follows an error about unknown arguments: the options and the arguments that were meant."""
        named = {name: CALL_WORDS.get(name, name) for name in unknown}
        options = [option for option in named.values() if option in self._call_options]
        others = [name for name, option in named.items() if option not in self._call_options]
        known = list(self._signature.parameters)
        hint = ""
        if options:
            shown = ", ".join(f"{option}=..." for option in options)
            hint += f"; options come before the call: options({shown})"
        if others and known:
            hint += f"; its arguments are {', '.join(known)}{nearest(others[0], known)}"
        return hint

    def decode(self, data: bytes) -> dict[str, Any]:
        """Decode the arguments of a message, by name. Raises `InvalidArguments`."""
        try:
            decoded: dict[str, Any] = self._type.read(data, by_alias=True)
        except RecursionError:
            raise InvalidArguments(self._name, "nested too deeply", malformed=True) from None
        except ValidationError as error:
            malformed = any(not found["loc"] for found in error.errors(include_url=False, include_input=False))
            raise InvalidArguments(self._name, _problem(error), malformed=malformed) from None
        return decoded


def _arguments_type(name: str, handler: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> JsonType:
    hints = type_hints(name, handler)
    declared = {parameter.name: hints.get(parameter.name, Any) for parameter in parameters}
    fields = {
        parameter.name: stored if parameter.default is parameter.empty else NotRequired[stored]
        for parameter in parameters
        for stored in (storable(declared[parameter.name]),)
    }
    shape = TypedDict(f"arguments of {name}", fields)  # type: ignore[misc]  # its fields are the handler's parameters
    shape.__pydantic_config__ = ConfigDict(extra="forbid", ser_json_inf_nan="strings")  # type: ignore[attr-defined]
    try:
        arguments = JsonType(shape)
    except PydanticUserError as error:
        raise TaskDefinitionError(f"task {name!r}: {_misdeclared(declared) or error.message}") from None
    if arguments.problem is not None:
        problem = _unreadable(declared) or arguments.problem
        raise TaskDefinitionError(f"task {name!r}: its arguments cannot be read back from JSON: {problem}")
    return arguments


def _has_unique_items(form: Any, definitions: Mapping[str, Any], seen: set[str]) -> bool:
    """Return whether a JSON schema has arrays without an order, as those of sets are."""
    if isinstance(form, list):
        return any(_has_unique_items(item, definitions, seen) for item in form)
    if not isinstance(form, dict):
        return False
    if form.get("uniqueItems") is True:
        return True
    reference = str(form.get("$ref", "")).removeprefix("#/$defs/")
    if reference and reference not in seen:
        seen.add(reference)
        if _has_unique_items(definitions.get(reference), definitions, seen):
            return True
    return any(_has_unique_items(item, definitions, seen) for item in form.values())


def _misdeclared(parameters: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the first parameter whose type cannot be that of JSON data."""
    for name, declared in parameters.items():
        try:
            JsonType(declared)
        except PydanticUserError as error:
            return f"parameter {name!r}: {type_problem(declared, error)}"
    return None


def _unreadable(parameters: Mapping[str, Any]) -> str | None:
    found = ((name, JsonType(declared).problem) for name, declared in parameters.items())
    return next((f"parameter {name!r}: {problem}" for name, problem in found if problem is not None), None)


def type_hints(name: str, handler: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(handler, include_extras=True)
    except (NameError, TypeError) as error:
        raise TaskDefinitionError(
            f"task {name!r}: an annotation cannot be resolved: {error}; import the type where the module is loaded, "
            "not only under TYPE_CHECKING"
        ) from None


def _problem(error: ValidationError) -> str:
    found = error.errors(include_url=False)
    return listed((describe_problem(problem) for problem in found), 3, "; ")
