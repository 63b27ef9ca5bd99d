"""The reference pages name everything that the code has, and nothing that it does not have."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import perdure
import perdure.context
import perdure.memory
import perdure.otel
import perdure.queues
import perdure.testing
import perdure.web
import pytest
from perdure.deadletter.policy import Reason
from perdure.queues import State, envelope, inbox, stream_items, values, waits
from perdure.queues import errors as queue_errors
from perdure.queues.budgets.definition import MAX_OWN, MAX_WINDOW
from perdure.queues.defaults import MAX_SECONDS, MAX_TURNS
from perdure.queues.derived_tasks import MAX_HAND_OFFS
from perdure.queues.envelope import DEFAULT_LARGE_LIMIT, DEFAULT_PAYLOAD_LIMIT
from perdure.queues.groups import MAX_GROUP
from perdure.queues.keys import LimitKeys, Namespace, Partition, SessionPartition, junk_keys
from perdure.queues.limits.control import MAX_HOLD
from perdure.queues.limits.definition import MAX_RATE
from perdure.queues.partitions.route import MAX_PARTITIONS
from perdure.queues.pauses import MAX_RULES
from perdure.queues.schedules.definition import MAX_MISSED
from perdure.queues.schemas import SCHEMA_BYTES
from perdure.queues.sessions.turns import MAX_WAITING
from perdure.worker import errors as worker_errors
from perdure.worker.cli import commands
from perdure.worker.cli.schedule import MAX_BACKFILL
from perdure.worker.durable import joining
from perdure.worker.durable.journal.event import BUILT_IN
from perdure.worker.durable.journal.function_plan import MAX_STEPS
from perdure.worker.durable.promises import MAX_PROMISES
from perdure.worker.durable.steps.current import MAX_NAME_LENGTH
from perdure.worker.durable.stop_reasons import STOP_RULES
from perdure.worker.memory.memory import MAX_SOURCE_LENGTH, MAX_TEXT_LENGTH
from perdure.worker.runtime.metrics.families import FAMILIES
from perdure.worker.settings import Settings
from perdure.worker.web.operation import MAX_LIMIT
from perdure.worker.web.operations.enqueue import MAX_BATCH
from perdure.worker.web.service import MAX_BODY, MAX_REQUESTS
from perdure.worker.workspace.manifest import MAX_PATH_LENGTH

from tests.project import llms_page, rights_page
from tests.project.api_page import PAGES, undescribed
from tests.project.test_error_trees import defined
from tests.support.paths import ROOT

REFERENCE = ROOT / "docs" / "reference"
STORAGE = ROOT / "queues" / "STORAGE.md"


def section(page: str | Path, title: str) -> str:
    """Return the text below a `##` heading of a page."""
    text = (REFERENCE / page).read_text("utf-8")
    return re.split(r"^## ", text.partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows whose first cell is in backticks."""
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:3] == "| `"]
    return [[cell.strip(" |") for cell in row] for row in found]


def names(text: str) -> list[str]:
    return [row[0].strip("`") for row in rows(text)]


def assert_same(documented: Iterable[str], existing: Iterable[str]) -> None:
    """Fail with the names that the page lacks, does not need, or lists twice."""
    counts = Counter(documented)
    problems = {
        "missing from the page": sorted(set(existing) - counts.keys()),
        "on the page, but not in the code": sorted(counts.keys() - set(existing)),
        "twice on the page": sorted(name for name, count in counts.items() if count > 1),
    }
    if found := {problem: those for problem, those in problems.items() if those}:
        pytest.fail(str(found))


# api.md


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_pages_of_the_api_have_the_signatures_and_docstrings_of_the_code(path: Path) -> None:
    assert path.read_text("utf-8") == PAGES[path](), "write it again: python -m tests.project.api_page"


def test_every_public_method_stands_on_a_page_with_what_it_is() -> None:
    assert undescribed() == []
    text = "".join(path.read_text("utf-8") for path in PAGES)
    for method in ("handle.record", "handle.explain", "handle.send", "limit.hold", "perdure_clock.advance"):
        assert f"{method}(" in text
    for module in (
        perdure,
        perdure.context,
        perdure.memory,
        perdure.otel,
        perdure.testing,
        perdure.web,
        perdure.queues,
    ):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not (isinstance(value, type) and issubclass(value, BaseException)):
                assert f"# {name}\n" in text or f"{name}(" in text or name == "SyncContext", name


# llms.txt


def test_the_list_for_coding_agents_is_that_of_the_index() -> None:
    assert llms_page.PAGE.read_text("utf-8") == llms_page.llms_page(), (
        "write it again: python -m tests.project.llms_page"
    )


# settings.md


def test_the_security_page_has_the_users_and_the_table_of_the_tests() -> None:
    page = rights_page.PAGE.read_text("utf-8")
    assert page == rights_page.rights_page(page), "write it again: python -m tests.project.rights_page"


def test_settings_page_lists_every_variable_once() -> None:
    page = (REFERENCE / "settings.md").read_text("utf-8")
    assert_same(names(page), [f"PERDURE_{field.upper()}" for field in Settings.model_fields])


@pytest.mark.parametrize("field", Settings.model_fields)
def test_documented_default_of_a_setting_is_its_default(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = f"PERDURE_{field.upper()}"
    page = (REFERENCE / "settings.md").read_text("utf-8")
    [default] = [row[1] for row in rows(page) if row[0] == f"`{variable}`"]
    monkeypatch.setenv(variable, "" if default == "-" else default.strip("`"))
    assert getattr(Settings(), field) == Settings.model_fields[field].default
    if default == "-":
        assert not unwrapped(Settings.model_fields[field].default)


def unwrapped(value: Any) -> Any:
    return value.get_secret_value() if hasattr(value, "get_secret_value") else value


# values.md


LIMITS: Final[dict[str, Sequence[float | str]]] = {
    "tags of a task": (envelope.MAX_TAGS, envelope.MAX_TAG_LENGTH),
    "`key` (": (envelope.MAX_KEY_LENGTH,),
    "token of a wait": (waits.TOKEN_LENGTH,),
    "name of a step": (MAX_NAME_LENGTH,),
    "name of an artifact": (MAX_PATH_LENGTH,),
    "arguments, a result": (DEFAULT_PAYLOAD_LIMIT, DEFAULT_LARGE_LIMIT),
    "unread messages of a task": (inbox.MAX_MESSAGES, inbox.INBOX_BYTES),
    "named values of a task": (values.MAX_VALUES, values.VALUE_BYTES),
    "an item of a [stream]": (stream_items.ITEM_BYTES, stream_items.STREAM_BYTES),
    "answers that a task keeps": (waits.MAX_EARLY, waits.EARLY_BYTES),
    "JSON schema of arguments": (SCHEMA_BYTES,),
    "text of a [memory]": (f"{MAX_TEXT_LENGTH:,}", MAX_SOURCE_LENGTH),
    "body of a request": (MAX_BODY,),
    "steps of the plan": (MAX_STEPS,),
    "open promises": (MAX_PROMISES,),
    "children of one call": (joining.MAX_CHILDREN, joining.DEFAULT_LIMIT),
    "tasks of one group": (MAX_GROUP,),
    "parents above a child": (joining.MAX_DEPTH, MAX_HAND_OFFS),
    "messages that wait for their turn": (MAX_WAITING, MAX_TURNS),
    "`limits` of a task": (envelope.MAX_LIMITS,),
    "budgets that a task names": (MAX_OWN, envelope.MAX_BUDGETS),
    "pauses of a namespace": (MAX_RULES,),
    "missed times": (MAX_MISSED, MAX_BACKFILL),
    "partitions of a queue": (MAX_PARTITIONS,),
    "tasks of one HTTP request": (MAX_BATCH, MAX_LIMIT),
    "HTTP requests of one user": (MAX_REQUESTS,),
    "`rate`, `cost` of a limit": (MAX_RATE,),
    "a hold of a limit": (MAX_HOLD / 86_400, MAX_WINDOW / 86_400),
    "`delay`": (MAX_SECONDS,),
}
"""Limits by the start of their row of values.md."""


def shown(limit: float | str) -> str:
    """Return a limit as the page writes it."""
    if isinstance(limit, str):
        return limit
    if limit == 10**10:
        return "10^10"
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 14)):
        if limit >= size and limit % size == 0:
            return f"{limit // (1024 if unit == 'KiB' else size):.0f} {unit}"
    return f"{limit:,.0f}"


@pytest.mark.parametrize("row", LIMITS)
def test_a_limit_of_the_page_is_that_of_the_code(row: str) -> None:
    page = (REFERENCE / "values.md").read_text("utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {row}")]
    for limit in LIMITS[row]:
        assert re.search(rf"(?<!\d)(?<!\d,){re.escape(shown(limit))}(?!,?\d)", line), (shown(limit), line)


# cli.md

SHARED = {
    "[CONNECTION]": {"--redis-url", "--namespace", "--data-dir"},
    "[MEMORY]": {"--memory", "--data-dir"},
    "[TENANT]": {"--tenant"},
}


def cli(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, with its path. A command of the lazy table is imported first."""
    command = command.fetch() if hasattr(command, "fetch") else command
    subcommands = getattr(command, "commands", {})
    if not subcommands or len(path) == 1:
        yield " ".join(path), command
    for name, subcommand in subcommands.items():
        yield from cli(subcommand, *path, name)


COMMANDS = dict(cli(commands, "perdure"))


def synopsis(path: str) -> str:
    text = (REFERENCE / "cli.md").read_text("utf-8")
    return text.partition(f"\n### {path}\n\n```text\n")[2].partition("```")[0]


def test_cli_page_lists_every_command_once() -> None:
    page = (REFERENCE / "cli.md").read_text("utf-8")
    assert_same(re.findall(r"^### (.*)$", page, re.MULTILINE), COMMANDS)


@pytest.mark.parametrize("path", COMMANDS)
def test_synopsis_has_the_arguments_and_options_of_the_command(path: str) -> None:
    text = synopsis(path)
    documented = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    for placeholder, options in SHARED.items():
        documented |= options if placeholder in text else set()
    parameters = COMMANDS[path].params
    options = {name for one in parameters for name in (*one.opts, *one.secondary_opts) if name.startswith("--")}
    assert_same(documented, options - {"--help"})
    assert " ".join(text.split()).startswith(path)
    for one in parameters:
        if one.param_type_name == "argument":
            name = (one.metavar or one.name.upper()).strip("[].")
            assert re.search(rf"(?<!-)\b{re.escape(name)}\b", text), name
        elif one.multiple:
            assert re.search(rf"\[{one.opts[0]} [^\]]*\]\.\.\.", text), f"{one.opts[0]} may be repeated"


# metrics.md


@pytest.mark.integration
@pytest.mark.processes
def test_metrics_page_lists_every_gauge_once(redis_url: str, namespace_name: str) -> None:
    command = [sys.executable, "-m", "perdure.worker.cli", "queue", "metrics"]
    options = ["--redis-url", redis_url, "--namespace", namespace_name]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=True)
    gauges = re.findall(r"^# TYPE (\S+) gauge$", done.stdout, re.MULTILINE)
    assert gauges
    assert_same(names(section("metrics.md", "Queues")), gauges)


def test_metrics_page_lists_every_metric_of_workers_with_its_labels() -> None:
    documented = {row[0].strip("`"): row[1:3] for row in rows(section("metrics.md", "Workers")) if "perdure_" in row[0]}
    assert documented == {
        family.name: [family.kind, ", ".join(f"`{label}`" for label in family.labels) or "-"]
        for family in FAMILIES.values()
    }


def test_metrics_page_lists_every_outcome_of_a_run() -> None:
    page = section("metrics.md", "Workers").partition("| outcome |")[2]
    documented = [
        word for line in re.findall(r"^\| (`[a-z_`, ]+) \|", page, re.MULTILINE) for word in re.findall(r"\w+", line)
    ]
    ends = {reason.value for reason, rule in STOP_RULES.items() if rule.act is not None}
    never_stored = {"incoherent", "exhausted", "data_lost"}  # they are buried; a run without its entries is lost
    assert_same(documented, (ends | {"lost"}) - never_stored)


# errors.md


def error_classes() -> dict[str, type[BaseException]]:
    return {name: kind for module in (queue_errors, worker_errors) for name, kind in defined(module).items()}


BESIDE: Final[dict[str, type[BaseException]]] = {
    kind.__name__: kind for kind in (worker_errors.RecordedFailure, worker_errors.RunStopped)
}
"""Classes that are raised and are no `PerdureError`."""


def test_errors_page_lists_every_error_once() -> None:
    assert_same(names((REFERENCE / "errors.md").read_text("utf-8")), error_classes() | BESIDE)


def test_error_tree_of_the_page_is_that_of_the_classes() -> None:
    tree = (REFERENCE / "errors.md").read_text("utf-8").split("```")[1]
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in tree.split("\n")[1:-1]:
        depth, name = len(re.findall("[│├└ ][ ─]{3}", line)), re.split("[^A-Za-z]+", line)[-1]
        above = [*above[:depth], name]
        parents[name] = above[-2] if depth else ""
    classes = error_classes()
    first_base = {name: kind.__bases__[0].__name__ for name, kind in classes.items()}
    assert parents == {name: base if base in classes else "" for name, base in first_base.items()}


# STORAGE.md

PLACEHOLDERS = {
    "task_id": "ID",
    "worker_id": "ID",
    "supervisor_id": "ID",
    "member": "MEMBER",
    "supervisor": "NAME",
    "queue": "QUEUE",
    "app": "APP",
    "version": "VERSION",
    "task": "TASK",
    "digest": "ID",
    "content": "DIGEST",
    "name": "NAME",
    "agent": "AGENT",
    "group": "GROUP",
    "key": "KEY",
    "key_id": "KEYID",
    "ring": "RING",
    "schedule": "SCHEDULE",
}
NO_KEYS = {
    "name",
    "namespace",
    "tenant",
    "queue",
    "index",
    "partition",
    "task_id",
    "task_keys",
    "run_keys",
    "worker_channel",
}
NO_KEYS |= {"session_partition", "session_partitions", "shared_keys", "token", "unique", "limits", "lane"}
NO_KEYS |= {"tenant", "ledger", "ledger_index", "pause_place", "pause_channel"}
NO_KEYS |= {"store", "schedule_place", "schedule_channel", "job_place"}
NO_KEYS_OF_LIMITS: Final = {"namespace", "place", "of_uses"}
"""Members of `Namespace` and `Partition` that are parts or patterns of keys, take keys apart, or return several."""


def keys_of(owner: Namespace | Partition | SessionPartition | LimitKeys) -> set[str]:
    """Return every key that the members of `owner` build, with placeholders for their parameters."""
    found: set[str] = set()
    without = NO_KEYS_OF_LIMITS if isinstance(owner, LimitKeys) else NO_KEYS
    for member in dir(owner):
        if member.startswith("_") or member in without:
            continue
        value: str | tuple[str, ...] | Callable[..., str | tuple[str, ...]] = getattr(owner, member)
        if callable(value):
            parameters = inspect.signature(value).parameters
            if any(parameter.default is not parameter.empty for parameter in parameters.values()):
                found.add(str(value("NAME")))  # of all keys of a limit
            value = value(*(PLACEHOLDERS[name] for name in parameters))
        keys = (value,) if isinstance(value, str) else value
        found.update(key.replace(":0}", ":n}").replace(":ID:GROUP", ":PARENT:GROUP") for key in keys)
    if isinstance(owner, Namespace):
        found.add(re.sub(r"~tokens:\d+\}:token:.*", "~tokens:n}:token:DIGEST", owner.token("x").key))
        found.add(re.sub(r"~unique:\d+\}:unique:.*", "~unique:n}:unique:DIGEST", owner.unique("0" * 32).key))
        found.discard("")
    if isinstance(owner, LimitKeys):
        without_keys = {owner.rate("NAME"), owner.cost("NAME")}
        return {key.replace(":n}", ":0}") for key in found} - without_keys
    tag, end, _ = min(found, key=len).partition("}:")
    return found | set(junk_keys(f"{tag}{end}NAME"))


@pytest.mark.parametrize(
    ("title", "owner"),
    [
        ("Keys of a partition", Namespace("ns").partition("queue")),
        ("Keys of sessions", SessionPartition("ns", 0)),
        ("Keys of limits", Namespace("ns").limits),
        ("Keys of a namespace", Namespace("ns")),
    ],
)
def test_storage_page_lists_every_key_once(
    title: str, owner: Namespace | Partition | SessionPartition | LimitKeys
) -> None:
    assert_same(names(section(STORAGE, title)), keys_of(owner))


def test_storage_page_lists_the_keys_of_budgets() -> None:
    found = {re.sub(r"budgets:\d+", "budgets:n", key) for key in Namespace("ns").ledger("ID")[:-1]}
    assert_same(names(section(STORAGE, "Keys of budgets")), found)


def test_storage_page_lists_the_keys_of_the_store() -> None:
    keys = Namespace("ns").store(["threads"])
    made = [*keys[:-2], keys.upload("UPLOAD"), keys.value("UPLOAD")]
    assert_same(names(section(STORAGE, "Keys of the store")), {key.replace(keys.digest, "ID") for key in made})


def written_fields() -> set[str]:
    """Return the hash fields that scripts write; of a computed name the constant beginning: `d:`, `spent_`."""
    found = set()
    for script in [*ROOT.glob("queues/lua/*.lua"), *ROOT.glob("deadletter/lua/*.lua")]:
        code = re.sub("--.*", "", script.read_text("utf-8"))
        for command, text in re.findall(r"redis\.call\('(HSET|HSETNX|HINCRBY)',((?:[^()]|\([^()]*\))*)\)", code):
            arguments = [one.strip() for one in re.split(r",(?![^(]*\))", text)]
            fields = arguments[1::2] if command == "HSET" else arguments[1:2]
            found |= {match[1] for field in fields if (match := re.match("'([^']+)'", field))}
    return found


def test_storage_page_lists_the_fields_that_scripts_write() -> None:
    documented = {name for row in rows(STORAGE.read_text("utf-8")) for name in re.findall("`([^`]+)`", row[0])}
    missing = {
        field
        for field in written_fields()
        if not (any(name.startswith(field) for name in documented) if field[-1] in ":_" else field in documented)
    }
    assert not missing


@pytest.mark.parametrize("title", ["Record", "Inbox", "Control", "Checkpoint", "Session"])
def test_storage_page_lists_no_field_that_the_code_does_not_have(title: str) -> None:
    sources = [*ROOT.glob("queues/lua/*.lua"), *ROOT.glob("deadletter/lua/*.lua"), *ROOT.glob("queues/**/*.py")]
    text = "\n".join(source.read_text("utf-8") for source in sources)
    fields = [name for row in rows(section(STORAGE, title)) for name in re.findall("`([^`]+)`", row[0])]
    assert fields
    unknown = [name for name in fields if not re.search(rf"""['"]{name.rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")}""", text)]
    assert not unknown


# events.md, task-states.md


def test_events_page_lists_every_type_once() -> None:
    assert_same(names(section("events.md", "Types")), BUILT_IN)


def test_states_page_lists_every_state_and_reason_once() -> None:
    page = (REFERENCE / "task-states.md").read_text("utf-8")
    states, _, rest = page.partition("## How a delivery ends")
    assert_same(names(states), State)
    assert_same(names(rest.partition("## Reasons of dead letters")[2]), Reason)
