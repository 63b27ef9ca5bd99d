"""Redis keys: one hash slot per partition, and scripts that use declared keys only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import perdure
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perdure.queues import Namespace, Partition
from perdure.queues.transport.scripts import load_script

from tests.conftest import watched

FOLDER = Path(perdure.__file__).parent
SCRIPTS = sorted(FOLDER.glob("*/lua/*.lua"))
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)

PRELUDES = {
    *("bounded", "fence", "inbox", "joins", "on_end", "payload", "retention", "seen", "upload", "values", "waits"),
    *("depth", "limits", "limited", "store", "tag", "turns", "streams", "wake", "watched"),
}
KEYLESS = {"INFO", "TIME"}
FIRST = {
    "XPENDING",
    "XAUTOCLAIM",
    "XCLAIM",
    "XACK",
    "XDEL",
    "XADD",
    "XRANGE",
    "XREVRANGE",
    "XTRIM",
    "SET",
    "TYPE",
    "EXISTS",
    "DEL",
    "PEXPIRE",
    "PERSIST",
}
FIRST |= {"GET", "GETEX", "GETSET"}
FIRST |= {"HGET", "HGETALL", "HMGET", "HSET", "HSETNX", "HDEL", "HEXISTS", "HINCRBY", "HSTRLEN", "PUBLISH"}
FIRST |= {"ZADD", "ZREM", "ZSCORE", "ZRANGE", "ZRANGEBYSCORE", "ZRANGEBYLEX", "ZREVRANGEBYLEX", "ZPOPMIN"}
FIRST |= {"HSCAN", "HKEYS", "HLEN", "XLEN", "ZCARD", "ZCOUNT", "ZREMRANGEBYSCORE", "ZREMRANGEBYRANK"}
FIRST |= {"SADD", "SREM", "SCARD", "SISMEMBER", "RPUSH", "LRANGE", "LLEN", "LTRIM"}
SECOND = {"XGROUP", "XINFO"}
EVERY = {"DEL", "EXISTS", "RENAME", "UNLINK"}
LATER = {"XREADGROUP"}
"""Commands by their keys: none, the first argument, the second, all, the first half of those after STREAMS."""


def all_keys(partition: Partition) -> list[str]:
    return [
        *(partition.ready, partition.nudge, partition.due, partition.seen, partition.dead, partition.closed),
        *(partition.promote_lock, partition.clean_lock, partition.sweep_lock),
        *(
            partition.record("x"),
            partition.steps("x"),
            partition.log("x"),
            partition.inbox("x"),
            partition.control("x"),
        ),
        partition.waiting,
    ]


# key names


def test_key_names_match_the_documented_table() -> None:
    partition = Namespace("perdure").partition("mail", 2)
    assert all_keys(partition) == [
        "{perdure:mail:2}:ready",
        "{perdure:mail:2}:nudge",
        "{perdure:mail:2}:due",
        "{perdure:mail:2}:seen",
        "{perdure:mail:2}:dead",
        "{perdure:mail:2}:closed",
        "{perdure:mail:2}:lock:promote",
        "{perdure:mail:2}:lock:clean",
        "{perdure:mail:2}:lock:sweep",
        "{perdure:mail:2}:record:x",
        "{perdure:mail:2}:steps:x",
        "{perdure:mail:2}:log:x",
        "{perdure:mail:2}:inbox:x",
        "{perdure:mail:2}:control:x",
        "{perdure:mail:2}:waiting",
    ]
    namespace = Namespace()
    assert (namespace.queues, namespace.workers) == ("{perdure}:queues", "{perdure}:registry:workers")
    assert namespace.sharing("mail") == "{perdure}:registry:sharing:mail"
    assert re.fullmatch(r"\{perdure:~tokens:\d+\}:token:[0-9a-f]{32}", namespace.token("order:17").key)
    assert namespace.unique("1f" * 16).key == "{perdure:~unique:15}:unique:" + "1f" * 16
    assert namespace.worker("a") == "{perdure}:registry:worker:a"


@given(NAMES, NAMES, st.integers(0, 999), NAMES)
def test_all_keys_of_a_partition_share_one_hash_tag(namespace: str, queue: str, index: int, task_id: str) -> None:
    """Redis Cluster hashes the part between the first '{' and the next '}'."""
    partition = Namespace(namespace).partition(queue, index)
    keys = [*all_keys(partition), partition.record(task_id), partition.steps(task_id), partition.log(task_id)]
    tags = {re.search(r"\{(.+?)\}", key)[1] for key in keys}  # type: ignore[index]
    assert tags == {f"{namespace}:{queue}:{index}"}
    assert all(key.startswith("{") and key.count("{") == key.count("}") == 1 for key in keys)


@given(st.lists(st.tuples(NAMES, NAMES, st.integers(0, 3), NAMES), min_size=2, max_size=6, unique=True))
def test_no_two_tasks_share_a_key(tasks: list[tuple[str, str, int, str]]) -> None:
    seen: set[str] = set()
    for namespace, queue, index, task_id in tasks:
        partition = Namespace(namespace).partition(queue, index)
        keys = {partition.record(task_id), partition.steps(task_id), partition.log(task_id)}
        keys |= {partition.inbox(task_id), partition.control(task_id)}
        assert len(keys) == 5
        assert not keys & seen
        seen |= keys


def test_partitions_compare_by_value() -> None:
    one, same, other = Namespace().partition("mail"), Namespace().partition("mail"), Namespace().partition("mail", 1)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert repr(one) == "Partition(namespace='perdure', queue='mail', index=0)"


# scripts


def test_a_script_across_hash_slots_is_detected() -> None:
    astray: list[str] = []
    submit = watched(lambda wire, command: command, astray)
    submit(None, ("EVALSHA", "x", 2, "{a:q:0}:ready", "{a:q:0}:due", "{b}"))
    assert astray == []
    submit(None, ("EVALSHA", "x", 2, "{a:q:0}:ready", "{a:q:1}:due"))
    assert astray == ["None touches ['a:q:0', 'a:q:1']"]


@dataclass(frozen=True)
class Call:
    """A `redis.call` of a script: the command, and its arguments as source text."""

    command: str
    arguments: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        if self.command in KEYLESS:
            return ()
        if self.command in LATER:
            names = self.arguments[self.arguments.index("'STREAMS'") + 1 :]
            return names[: len(names) // 2]
        if self.command in EVERY:
            return self.arguments
        return self.arguments[1:2] if self.command in SECOND else self.arguments[:1]


def code(path: Path) -> str:
    """Return the source of a script with its prelude and without comments."""
    return "\n".join(line.split("--")[0] for line in load_script(path).source.splitlines())


def calls(source: str) -> Iterator[Call]:
    for found in re.finditer(r"redis\.p?call\(", source):
        first, *rest = split(source[found.end() :])
        assert re.fullmatch(r"'[A-Z]+'", first), f"a command that is not written out: {first}"
        yield Call(first.strip("'"), tuple(rest))


def split(text: str) -> list[str]:
    """Return the arguments of a call, up to its closing bracket."""
    parts, depth, quoted = [""], 0, False
    for mark in text:
        if mark == "'":
            quoted = not quoted
        if not quoted:
            if mark == ")" and depth == 0:
                return [part.strip() for part in parts]
            depth += (mark in "([{") - (mark in ")]}")
            if mark == "," and depth == 0:
                parts.append("")
                continue
        parts[-1] += mark
    raise AssertionError("a call that is not closed")


def parameters(source: str) -> dict[str, set[str]]:
    """Return the values passed for each parameter of the local functions; an empty set if never called."""
    bound: dict[str, set[str]] = {}
    for name, listed in re.findall(r"local function (\w+)\(([\w, ]*)\)", source):
        names = [one for one in re.split(r"[ ,]+", listed) if one]
        bound.update({one: bound.get(one, set()) for one in names})
        for found in re.finditer(rf"(?<!function )\b{name}\(", source):
            given = [one for one in split(source[found.end() :]) if one]
            for parameter, value in zip(names, given, strict=True):
                bound.setdefault(parameter, set()).add(value)
    for values in bound.values():  # a function that passes a parameter on
        values.update(*(bound[nested] for nested in values & bound.keys()))
    return {name: values - bound.keys() for name, values in bound.items()}


DECLARED = re.compile(r"KEYS\[(\d+|i|i \+ [12])\]")
WORKER_CHANNEL = re.compile(r"ARGV\[\d+\] \.\. .+")
"""Channel of a worker that a script finds. It is no key: a cluster passes what is published to all nodes."""

OF_STREAMS = re.compile(r"key|unpack\((keys|streams)\)")
"""Keys that the prelude `streams` makes from that of the record, since only the record says which there are."""


OF_LIMITS = re.compile(
    r"TAG \.\. .+|(holders|waiters)\(.+\)|where|defined|notes|all|own|key|set|place|places\[i\]|bucket\.key"
)
"""Keys that the prelude `limits` makes from the tag of the clock, since only definitions say which a script needs."""

OF_STORE = re.compile(r"root \.\. .+|value|unpack\(values.+\)")
"""Keys that `store_write` makes from that of the entries, since only they say which values are in chunks."""

OF_LINES = re.compile(r"tag \.\. .+|record|list|turns|rings|key|(task|line|ring)\.(list|turns|record)")
"""Keys that the preludes `turns`, `limited` and `depth` make from the tag of a key: records say which."""


def _includes(path: Path, prelude: str) -> bool:
    return path.stem == prelude or prelude in re.split(r"[ ,\n]+", path.read_text("utf-8").split("\n", 1)[0])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_use_declared_keys_only(path: Path) -> None:
    source = code(path)
    bound = parameters(source)
    for call in calls(source):
        known = KEYLESS | FIRST | SECOND | EVERY | LATER
        assert call.command in known, f"{call.command}: where has it its keys? (tell {Path(__file__).name})"
        assert bool(call.keys) == (call.command not in KEYLESS)
        for key in call.keys:
            if call.command == "PUBLISH" and WORKER_CHANNEL.fullmatch(key):
                continue
            if _includes(path, "streams") and OF_STREAMS.fullmatch(key):
                continue
            if _includes(path, "store") and OF_STORE.fullmatch(key):
                continue
            if _includes(path, "limits") and OF_LIMITS.fullmatch(key):
                continue
            lines = any(_includes(path, prelude) for prelude in ("tag", "turns", "limited", "depth"))
            for value in {key} if lines and OF_LINES.fullmatch(key) else bound.get(key, {key}):
                if lines and OF_LINES.fullmatch(value):
                    continue
                assert DECLARED.fullmatch(value), f"{path.name}: {call.command} touches {value}, which is no KEYS[n]"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_build_no_key_names(path: Path) -> None:
    source = code(path)
    for prelude in ("streams", "limits", "tag", "turns", "limited", "depth"):
        if _includes(path, prelude):
            source = source.replace(code(FOLDER / f"queues/lua/{prelude}.lua"), "")
    for found in re.finditer(r"KEYS\[[^\]]*\]", source):
        around = source[max(0, found.start() - 4) : found.end() + 4]
        assert ".." not in around, f"{path.name}: {around}"
    kinds = "ready|nudge|due|seen|dead|closed|lock|record|steps|log|inbox|control|upload|outbox|joins|join|open|todo"
    assert not re.search(rf"[{{}}]:|:({kinds})\b", source)


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.stem not in PRELUDES], ids=lambda path: path.stem)
def test_the_header_of_a_script_declares_the_keys_of_its_body(path: Path) -> None:
    used = {int(number) for number in re.findall(r"KEYS\[(\d+)\]", code(path))}
    loop = re.search(r"for i = (\d+), #KEYS(?:, \d)? do", code(path))
    header = re.search(r"-- KEYS +(.*)", path.read_text("utf-8"))
    assert header is not None
    fixed = re.split(r", then ", header[1])[0].split(", ")
    assert used <= set(range(1, len(fixed) + 1))
    assert len(used) == len(fixed), f"{path.name}: the header declares {fixed}, the body uses KEYS{sorted(used)}"
    assert (loop is not None) == (", then " in header[1])
    if loop is not None:
        assert int(loop[1]) == len(fixed) + 1


def test_the_parser_finds_calls_and_parameters() -> None:
    found = list(calls("redis.call('HSET', KEYS[1], 'a', f(x, {1, 2}), ')')  redis.pcall('TIME')"))
    assert found == [Call("HSET", ("KEYS[1]", "'a'", "f(x, {1, 2})", "')'")), Call("TIME", ())]
    source = "local function f(stream)\nredis.call('DEL', stream)\nend\nf(KEYS[1])\nf(ARGV[2] .. ':x')"
    assert parameters(source) == {"stream": {"KEYS[1]", "ARGV[2] .. ':x'"}}
    assert all(one.stem != other.stem for one, other in pairwise(SCRIPTS))
    assert len(SCRIPTS) >= 17
