"""Gateway to Redis: every command, script and pipeline of Perdure is submitted here.

This module alone decides which commands share a write, which connection they use, and which are sent again after a
lost reply.

A command is repeatable if sending it twice has the effect of sending it once. Reads are repeatable, and so is every
script (enqueue by id, settle by fence, record by number) except for those that hand out messages. A repeatable command
whose reply was lost is sent again for `patience` seconds. Any other raises `Unavailable` at once, and its caller finds
out whether it was executed. `ServerFull` is also raised at once, since the server stays full until an operator frees
memory. Writes that replicas must confirm have a separate connection (replication.py).

A script that finds a value of another type under one of its keys is repeated once that was moved out of the way
(`set_keys_aside`). Each script is written so that its first execution, which ended there, and the second one do what
one execution on a missing key does. Other commands are repeated in a worker only: a listing leaves what it finds.

Scripts are called by their digest. After a NOSCRIPT reply (a restart, a failover, SCRIPT FLUSH) a process loads the
scripts that the server lacks. A producer's user may not load scripts: its gateway repeats the call until a worker or an
operator has loaded them, for `GatewayTimings.scripts` seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import anyio
import anyio.to_thread
import redis.asyncio
from redis.asyncio.client import PubSub
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoPermissionError, NoScriptError, RedisError

from ..errors import NotOpen, NotReplicated, QueueError, Refused, ServerFull, Unavailable, WrongType
from ..keys import JUNK_ENTRIES, JUNK_TTL_MS, junk_keys, stored_type
from ..runtime import RUNTIME
from ..security.encryption import NO_KEYS, Encryptor
from .address import Address, Node
from .backoff import Backoff
from .blocking import BlockingConnection
from .clients import (
    COMMAND_TIMEOUT,
    START_REMEDY,
    async_client,
    denied,
    is_read_only,
    is_wrong_type,
    pipelined_connection,
    translated,
    was_not_executed,
)
from .cluster.client import ClusterConnection
from .cluster.hash_slots import UnknownCommandError, key_of
from .pipelining import Argument, ClientAdapter, Command, CommandConnection, PipelinedConnection
from .replication import Replication, Replicator
from .scripts import Script, queue_script, queue_scripts
from .server_check import DEFAULT_REQUIREMENTS, ServerRequirements, check_servers, recognise
from .threadsafe_calls import ThreadsafeCaller
from .value_store import ValueStore

if TYPE_CHECKING:
    from ..embedded.server import EmbeddedServer
    from ..security.approvers import AnswerKeys

_SET_KEY_ASIDE: Final = queue_script("set_key_aside")
_logger = logging.getLogger(__name__)

_BACKOFF: Final = Backoff(first=0.02, longest=1.0)
"""Delays before a command is sent again."""

_FOR_A_WORKER: Final = 10.0
"""Seconds that a process without the right to move a value of another type waits for a worker, at least."""

_NODE_TIMEOUT: Final = 2.0
"""Seconds that the loading of scripts waits for a primary of a cluster, which may just be being replaced."""

Primary: TypeAlias = Callable[[Command], asyncio.Future[Any]]
"""Submits a command to one primary."""

_ERRORS: Final = (RedisError, OSError, Unavailable)
"""Errors of the client library, and `Unavailable` for those that are already translated."""


@dataclass(frozen=True)
class GatewayTimings:
    """Waits of a gateway for the server, in seconds.

    Args:
        reply: for the reply to a command.
        block: that one blocking read waits on the server.
        read_margin: after `block` at which the connection of a blocking read counts as lost.
        silence: without a notification after which the server gets a PING.
        suspicious: that connecting may take before another protocol is suspected.
        ping: for the reply to that PING.
        scripts: that a call waits for another process to load the scripts.
    """

    reply: float = COMMAND_TIMEOUT
    block: float = 5.0
    read_margin: float = 10.0
    silence: float = 10.0
    suspicious: float = 1.0
    ping: float = 5.0
    scripts: float = 10.0


class Gateway:
    """Commands, scripts and pipelines on one server, or on the nodes of a cluster."""

    timings: ClassVar[GatewayTimings] = GatewayTimings()
    """Waits of all gateways of this process; tests shorten them."""

    log_findings: ClassVar[bool] = True
    """Whether this process logs what its servers are not. Of the workers of a supervisor, the first one does."""

    def __init__(
        self,
        address: Address,
        *,
        patience: float = 3.0,
        replication: Replication | None = None,
        encryptor: Encryptor = NO_KEYS,
        answer_keys: AnswerKeys | None = None,
        requirements: ServerRequirements | None = DEFAULT_REQUIREMENTS,
    ) -> None:
        """Args:
        patience: seconds for which a repeatable command is sent again before `Unavailable` is raised.
        replication: number of replicas that must confirm a write of `run_replicated`, and the timeout.
        encryptor: kept here for the modules that read and write data of tasks; the gateway itself does not use it.
        answer_keys: kept here for the modules that send and read answers.
        requirements: conditions under which the server is used; None for a process whose workers check them.
        """
        self.address = address
        self.replication = replication or Replication()
        self.encryptor = encryptor
        self.answer_keys = answer_keys
        self.requirements = requirements
        self.patience = patience
        self._embedded = None if address.directory is None else _embedded_server(address.directory)
        self._client: redis.asyncio.Redis | None = None
        self._connection: CommandConnection | None = None
        self._cluster: ClusterConnection | None = None
        self._replicator: Replicator | None = None
        self._borrowed = False
        self.repairs = False  # whether all commands, and not only scripts, move a value of another type out of the way
        self.value_store: ValueStore | None = None  # for the largest values; kept here, as `encryptor` is
        self.denied: set[str] = set()
        """Names of scripts that this user may not run, and that have a replacement: they are not tried again."""
        self._may_load = True  # until the server says that this user may not load scripts
        self._loading: asyncio.Future[int] | None = None
        self._sync_caller: ThreadsafeCaller | None = None

    @property
    def sync_caller(self) -> ThreadsafeCaller:
        """The caller of this gateway's event loop for synchronous code. Raises `NotOpen`."""
        if self._sync_caller is None:
            raise NotOpen(f"the connection to {self.address.shown} is not open")
        return self._sync_caller

    @property
    def clustered(self) -> bool:
        """Whether the keys are spread over the nodes of a Redis Cluster."""
        return self.address.clustered

    @classmethod
    def over(cls, client: redis.asyncio.Redis) -> Gateway:
        """Return a gateway over an existing client, such as a fake one. The client is neither checked nor closed."""
        gateway = cls(Address("redis://borrowed"))
        client.response_callbacks.clear()
        gateway._client = client
        gateway._connection = ClientAdapter(client)
        gateway._borrowed = True
        return gateway

    async def open(self) -> None:
        """Connect and check the server. Raises `Unavailable`, `Refused` or `ConfigurationError`."""
        self._sync_caller = ThreadsafeCaller()
        try:
            await self._recognised(self._connect())
        except BaseException:
            await self.close()
            raise

    async def _connect(self) -> None:
        self.address.check_files()
        if self.clustered:
            self._connection = self._cluster = ClusterConnection(self.address, self._dial)
            await self._repeat(self._cluster.open)
        else:
            await self._ensure_embedded()
            self._client = async_client(self.address, self.socket)
            self._connection = self._dial(None)
        await self._repeat(self._check_server)

    async def _recognised(self, connect: Coroutine[Any, Any, None]) -> None:
        """Connect. If that takes long or fails, find out whether the server speaks another protocol (`Refused`)."""
        connecting = asyncio.ensure_future(connect)
        try:
            await asyncio.wait({connecting}, timeout=self.timings.suspicious)
            failed = connecting.done() and isinstance(connecting.exception(), (Unavailable, Refused))
            if (failed or not connecting.done()) and (found := await recognise(self.address)) is not None:
                raise Refused(found)
            await connecting
        finally:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        connection, self._connection = self._connection, None
        replicator, self._replicator = self._replicator, None
        self._cluster = None
        with anyio.CancelScope(shield=True):
            if replicator is not None:
                await replicator.close()
            if connection is not None:
                await connection.close()
            if client is not None and not self._borrowed:
                await client.aclose()
            if self._embedded is not None:
                await anyio.to_thread.run_sync(self._embedded.leave)

    def _dial(self, node: Node | None) -> CommandConnection:
        return PipelinedConnection(pipelined_connection(self.address, self.socket, node), self.timings.reply)

    async def _ensure_embedded(self) -> Path | None:
        if self._embedded is None:
            return None
        return await anyio.to_thread.run_sync(self._embedded.ensure)

    @property
    def socket(self) -> Path | None:
        """The embedded server's socket; None for any other server."""
        return None if self._embedded is None else self._embedded.socket

    async def _check_server(self) -> None:
        await check_servers(self.address, self.requirements, self.primaries(), log=self.log_findings)

    def primaries(self) -> Mapping[str, Primary]:
        """Return how to submit one command to each primary of a cluster by its address, or to the one server by "".

        Such a command is sent once, and raises errors of redis-py.
        """
        cluster = self._cluster
        if cluster is None:
            return {"": self._submit}
        return {str(node): partial(cluster.submit_to, node) for node in cluster.reachable()}

    async def _repeat(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except _ERRORS as error:
            await self._retry(error, call, True)

    # commands

    async def command(self, *command: Argument, repeatable: bool = True, node_of: str | None = None) -> Any:
        """Execute one command and return the raw reply.

        Args:
            repeatable: whether the command may be sent again after a lost reply.
            node_of: in a cluster, a key whose node executes the command; for commands that name no key.
        """
        try:
            return await self._submit(command, node_of)
        except _ERRORS as error:
            keys = self._mended([command])
            return await self._retry(error, partial(self._submit, command, node_of), repeatable, command, keys)

    async def command_now(self, *command: Argument) -> Any:
        """Write one command that is not repeatable at once, see `submit_now`."""
        try:
            return await self.submit_now(*command)
        except _ERRORS as error:
            return await self._retry(error, partial(self._submit, command), False, command)

    def submit_now(self, *command: Argument) -> asyncio.Future[Any]:
        """Write one command at once, so that the server executes it while this process does something else."""
        reply = self._submit(command)
        self._open_connection.flush()
        return reply

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        derived: Callable[[], Iterable[str]] | None = None,
    ) -> Any:
        """Execute one script that may be sent again after a lost reply, as nearly all may.

        derived: returns the keys that the script makes itself, whose values of another type are moved away.
        """
        command = ("EVALSHA", script.sha, len(keys), *keys, *args)
        try:
            return await self._submit(command)
        except _ERRORS as error:
            mended = keys if derived is None else [*keys, *derived()]
            return await self._retry(error, partial(self._submit, command), True, command, mended)

    async def run_once(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Execute one script that must not be sent again after a lost reply."""
        command = ("EVALSHA", script.sha, len(keys), *keys, *args)
        try:
            return await self._submit(command)
        except _ERRORS as error:
            return await self._retry(error, partial(self._submit, command), False, command, keys)

    async def run_replicated(self, script: Script, keys: Sequence[str], args: Sequence[Argument], mark: str) -> Any:
        """Execute one script, and wait until the replicas that `replication` asks for have confirmed its writes.

        Raises `NotReplicated` if too few confirm in time. The writes are stored then, and a repeated call only asks the
        replicas again.

        Args:
            mark: a key in the script's hash slot for the marker write (see replication.py).
        """
        command = ("EVALSHA", script.sha, len(keys), *keys, *args)

        async def evaluate() -> Any:
            return await self._open_replicator().execute(command, mark)

        try:
            return await evaluate()
        except _ERRORS as error:
            return await self._retry(error, evaluate, True, command, keys)

    def _open_replicator(self) -> Replicator:
        """Return the replicator. Raises `NotOpen`."""
        connection = self._open_connection
        if isinstance(connection, ClientAdapter):
            raise Refused("replicas cannot be waited for on a client that was passed in")
        if self._replicator is None:

            def dial(node: Node | None) -> AbstractConnection:
                return pipelined_connection(self.address, self.socket, node)

            self._replicator = Replicator(self.address.shown, self.replication, dial, self._cluster)
        return self._replicator

    async def load_scripts(self) -> int:
        """Load the scripts of this version into the server, or every primary of a cluster. Return how many it lacked.

        Raises `Refused` if the user may not: producers have no right to load scripts.
        """
        loaded = 0

        async def load() -> None:
            nonlocal loaded
            try:
                loaded = await self._load_scripts()
            except NoPermissionError as error:
                raise denied(self.address.shown, ("SCRIPT", "EXISTS"), error) from error

        await self._repeat(load)
        return loaded

    async def missing_scripts(self) -> int:
        """Return how many scripts of this version the server lacks, or any primary of a cluster at most.

        Raises `Refused` if the user may not ask.
        """
        digests = [script.sha for script in queue_scripts()]
        command = ("SCRIPT", "EXISTS", *digests)
        with translated(self.address.shown, command):
            found = await asyncio.gather(*(ask(command) for ask in self.primaries().values()))
        return max(sum(not exists for exists in known) for known in found)

    async def _load_scripts(self) -> int:
        scripts = queue_scripts()
        cluster = self._cluster
        if cluster is None:
            return await _load_missing(scripts, self._submit)
        # A primary that is being given its first slot serves none yet.
        loading = (_load_missing(scripts, partial(cluster.submit_to, node)) for node in cluster.connected())
        found = await asyncio.gather(
            *(asyncio.wait_for(load, _NODE_TIMEOUT) for load in loading), return_exceptions=True
        )
        for answer in found:
            if isinstance(answer, NoPermissionError):
                raise answer
        # A primary that is unreachable now, or joins later, gets the scripts after a NOSCRIPT reply.
        return sum(answer for answer in found if isinstance(answer, int))

    async def _answer_noscript(self) -> bool:
        """Load the scripts that the server has lost. Return False if the user may not, so that another process must.

        Calls that get the same reply at the same time load the scripts once.
        """
        if not self._may_load:
            return False
        if self._loading is None or self._loading.done():
            self._loading = asyncio.ensure_future(self._load_scripts())
            self._loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(self._loading)
        except NoPermissionError:
            self._may_load = False
        except _ERRORS:
            return False  # the caller waits, and asks again
        return self._may_load

    async def pipeline(self, commands: Sequence[Command], *, node_of: str | None = None) -> list[Any]:
        """Execute repeatable commands in order and in one round trip, not atomically.

        In a cluster each command goes to the node that serves its key, or that of `node_of`; the order holds per node.
        If the server refuses a command, the others are executed, and `Refused` is raised.
        """
        try:
            return await self._gather(commands, node_of)
        except _ERRORS as error:
            call, mended = (lambda: self._gather(commands, node_of)), self._mended(commands)
            replies: list[Any] = await self._retry(error, call, True, keys=mended)
            return replies

    async def pipeline_each(self, commands: Sequence[Command], *, node_of: str | None = None) -> list[Any]:
        """Execute commands that only read, in one round trip. `Refused` is the reply of one that the server refuses.

        So a key of another type hides none of the others.
        """
        try:
            return await self.pipeline(commands, node_of=node_of)
        except Refused:
            each = (self.command(*command, node_of=node_of) for command in commands)
            replies = await asyncio.gather(*each, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, Refused):
                raise reply
        return replies

    async def _gather(self, commands: Sequence[Command], node_of: str | None) -> list[Any]:
        sent = [self._submit(command, node_of) for command in commands]
        replies = await asyncio.gather(*sent, return_exceptions=True)
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, NoPermissionError):
                raise denied(self.address.shown, command, reply)
            if isinstance(reply, BaseException):
                raise reply
        return replies

    def _submit(self, command: Command, node_of: str | None = None) -> asyncio.Future[Any]:
        if self._cluster is not None:
            return self._cluster.submit(command, node_of)
        return self._open_connection.submit(command)

    @property
    def _open_connection(self) -> CommandConnection:
        if self._connection is None:
            raise NotOpen(f"the connection to {self.address.shown} is not open: use it within 'async with'")
        return self._connection

    async def _retry(
        self,
        error: BaseException,
        call: Callable[[], Awaitable[Any]],
        repeatable: bool,
        command: Command | None = None,
        keys: Sequence[str] = (),
    ) -> Any:
        """Repeat a failed call while that is allowed and may help, for `patience` seconds, or until scripts are loaded.

        A call that the server refused without executing it may always be repeated.

        Args:
            command: what was sent, for the text of an error.
            keys: those of the call whose values of another type are moved out of the way.
        """
        started, delays = RUNTIME.monotonic(), _BACKOFF.delays()
        loaded = False
        while True:
            if keys and is_wrong_type(error):
                await self._mend(error, keys, repeatable, started + self.patience, next(delays))
            else:
                missing = isinstance(error, NoScriptError)
                loaded = missing and not loaded and await self._answer_noscript()
                if not loaded:
                    deadline = started + (max(self.patience, self.timings.scripts) if missing else self.patience)
                    may_repeat = repeatable or missing or was_not_executed(error)
                    await self._wait_to_retry(error, may_repeat, deadline, next(delays), command)
            try:
                return await call()
            except _ERRORS as next_error:
                error = next_error

    async def _mend(
        self, error: BaseException, keys: Sequence[str], repeatable: bool, deadline: float, delay: float
    ) -> None:
        """Move values of another type out of the way, or wait until a worker does. Raise the error if that is all."""
        problem = f"another program has put a value of another type under one of the keys {', '.join(keys[:10])}"
        moved = waits = False
        try:
            moved = await self.set_keys_aside(keys)
            waits = not moved and not await self._are_of_another_type(filter(_is_kept, keys))
        except Refused as refused:
            problem += f", which this user may not move ({refused}); a worker with the right to RENAME does"
            waits, deadline = True, deadline + max(0.0, _FOR_A_WORKER - self.patience)
        if not repeatable or not (moved or (waits and RUNTIME.monotonic() + delay <= deadline)):
            raise WrongType(f"{self.address.shown} refused a command: {error}: {problem}") from error
        if not moved:  # another process may have done so
            await anyio.sleep(delay)

    async def _are_of_another_type(self, keys: Iterable[str]) -> bool:
        """Return whether any of these keys has a value of another type."""
        wanted = {key: stored_type(key) for key in keys}
        types = await self.pipeline([("TYPE", key) for key in wanted]) if wanted else ()
        return any(found.decode() not in (stored, "none") for found, stored in zip(types, wanted.values(), strict=True))

    def _mended(self, commands: Sequence[Command]) -> Sequence[str]:
        """Return the first key of each command, if values of another type may be moved out of the way."""
        found: dict[str, None] = {}
        for command in commands if self.repairs else ():
            with suppress(UnknownCommandError):  # it has no key
                key = key_of(command)
                if isinstance(key, str):
                    found[key] = None
        return list(found)

    async def set_keys_aside(self, keys: Iterable[str]) -> bool:
        """Move values of another type, which another program has put under keys, to the junk, and warn of each.

        What the value has replaced is lost: a worker restores what it can. The checkpoint of a task stays, because a
        run without it would repeat its steps. Return whether a value was moved.
        """
        wanted = {key: stored for key in keys if (stored := stored_type(key)) is not None and not _is_kept(key)}
        types = await self.pipeline([("TYPE", key) for key in wanted])
        moved = False
        for (key, stored), found in zip(wanted.items(), types, strict=True):
            if found.decode() not in (stored, "none"):
                moved = await self._set_key_aside(key, stored) or moved
        return moved

    async def _set_key_aside(self, key: str, stored: str) -> bool:
        kept = junk_keys(key)
        args: tuple[Argument, ...] = (stored, JUNK_ENTRIES, JUNK_TTL_MS)
        found: bytes = await self.run(_SET_KEY_ASIDE, [key, kept.value, kept.entries], args)
        if found:
            _logger.warning(
                "key %s had a value of type %s instead of %s, which no part of Perdure wrote: moved it to %s, where it "
                "is kept for 30 days, and continued with a new key; find the program that wrote it",
                *(key, found.decode(), stored, kept.value),
            )
        return bool(found)

    async def _wait_to_retry(
        self, error: BaseException, repeatable: bool, deadline: float, delay: float, command: Command | None
    ) -> None:
        """Wait before the next attempt, or raise the translated error if no attempt may follow."""
        try:
            with translated(self.address.shown, command):
                raise error
        except (ServerFull, NotReplicated):
            raise  # an operator must free memory or repair a replica, which takes longer
        except Unavailable:
            if is_read_only(error) and self._connection is not None:
                self._connection.reconnect()
            if not repeatable or RUNTIME.monotonic() + delay > deadline or self._connection is None:
                raise
        await anyio.sleep(delay)
        await self._ensure_embedded()

    # dedicated connections

    def blocking_connection(self, key: str | None = None) -> BlockingConnection:
        """Return a connection for blocking reads. key: in a cluster, the key to read; the connection follows it."""
        if self._cluster is not None and key is None:
            raise ValueError("key must be given in a cluster: a blocking connection leads to the node that serves it")
        return BlockingConnection(
            self.address.shown,
            self._dial_blocking,
            self._unblock,
            cluster=self._cluster,
            key=key,
            borrowed=self._borrowed,
        )

    def _dial_blocking(self, node: Node | None) -> redis.asyncio.Redis:
        if self._borrowed:
            return self._client_or_fail()
        longest = self.timings.block + self.timings.read_margin
        return async_client(self.address, self.socket, timeout=longest, connections=1, node=node)

    async def _unblock(self, client_id: int, node: Node | None) -> Any:
        """End a blocked command of another client; client ids are local to a node."""
        command = ("CLIENT", "UNBLOCK", client_id)
        if self._cluster is None or node is None:
            return await self.command(*command)
        cluster = self._cluster
        try:
            return await cluster.submit_to(node, command)
        except _ERRORS as error:
            return await self._retry(error, lambda: cluster.submit_to(node, command), True)

    async def subscription(self) -> PubSub:
        """Return a connected pub/sub connection; in a cluster to any node, since PUBLISH reaches all of them."""
        if self._cluster is None:
            with translated(self.address.shown):
                return await _connected(self._client_or_fail().pubsub())
        lost: QueueError = Unavailable(f"no node of {self.address.shown} is known", START_REMEDY)
        for node in self._cluster.reachable():
            try:
                with translated(self.address.shown):
                    return await _connected(async_client(self.address, None, connections=1, node=node).pubsub())
            except Unavailable as error:
                self._cluster.mark_failed(node)
                lost = error
        raise lost

    def _client_or_fail(self) -> redis.asyncio.Redis:
        if self._client is None:
            raise NotOpen(f"the connection to {self.address.shown} is not open: use it within 'async with'")
        return self._client


def _is_kept(key: str) -> bool:
    """Whether a value of another type stays under a key: in place of the checkpoint of a task."""
    return "}:steps:" in key


async def _load_missing(scripts: Sequence[Script], submit: Callable[[Command], asyncio.Future[Any]]) -> int:
    """Load the scripts that a server does not have; return how many. Raises errors of the client library."""
    known = await submit(("SCRIPT", "EXISTS", *(script.sha for script in scripts)))
    missing = [script for script, found in zip(scripts, known, strict=True) if not found]
    await asyncio.gather(*(submit(("SCRIPT", "LOAD", script.source)) for script in missing))
    return len(missing)


async def _connected(pubsub: PubSub) -> PubSub:
    try:
        await pubsub.connect()
    except BaseException:
        await pubsub.aclose()
        raise
    return pubsub


def _embedded_server(directory: Path) -> EmbeddedServer:
    from ..embedded.server import EmbeddedServer  # not needed if there is a URL

    return EmbeddedServer(directory)
