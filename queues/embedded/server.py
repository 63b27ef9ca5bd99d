"""This process's share in the server of one data directory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import EmbeddedServerError
from .files import POLL, DataDirectory, exclusive, is_free, is_ready, shared, socket_path
from .launch import STOPPED_WITHIN, launch, log_since, log_size, read_record

__all__ = ["READY_WITHIN", "EmbeddedServer"]

READY_WITHIN = 120.0  # seconds from the start until all data are read: some ten gigabytes


class EmbeddedServer:
    """A share in the server of one data directory: while anyone holds one, the server runs.

    The share ends with `leave`, or with the process, however that dies. A forked child holds its
    parent's share too, until it leaves or ends. Several shares in one process are independent.
    All methods block, for tens of milliseconds when the server has to be started; call them from a
    thread when an event loop runs.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = DataDirectory(directory)
        self._share: int | None = None
        self._socket: Path | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def socket(self) -> Path:
        """The server's unix socket: where `ensure` last found it, before that where one would be made."""
        return self._socket or socket_path(self._directory)

    def ensure(self) -> Path:
        """Join, and return the socket of a server that has read its data and answers.

        Starts the server if none runs: at first, or again after it was killed. Costs a fraction of a
        millisecond when it runs.

        Raises:
            EmbeddedServerError: the directory cannot be used, there is no redis-server program, or the
                server did not start; the message quotes its log. This object then holds no share.
        """
        with self._guard():
            try:
                self._directory.prepare()
                with exclusive(self._directory.startup_lock, READY_WITHIN + STOPPED_WITHIN):
                    self._hold_share()
                    self._socket = _running_server(self._directory)
            except BaseException:
                self._drop_share()
                raise
            return self._socket

    def leave(self) -> None:
        """Give the share back. Nobody has to wait: the keeper stops the server if this was the last one."""
        with self._guard():
            self._drop_share()

    def __enter__(self) -> Self:
        self.ensure()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _guard(self) -> threading.Lock:
        if self._pid != os.getpid():  # forked, perhaps while another thread held the lock
            self._pid, self._lock = os.getpid(), threading.Lock()
        return self._lock

    def _hold_share(self) -> None:
        if self._share is not None:
            if os.fstat(self._share).st_nlink:
                return
            self._drop_share()  # the directory was removed: no keeper looks at this lock
        self._share = shared(self._directory.users_lock, STOPPED_WITHIN)

    def _drop_share(self) -> None:
        if self._share is not None:
            os.close(self._share)  # and no unlock: a forked child may go on using it
            self._share = None


def _running_server(directory: DataDirectory) -> Path:
    """The socket of the running server, started if need be. Call it with the startup lock and a share."""
    deadline = time.monotonic() + READY_WITHIN
    log_start = log_size(directory)
    launched = False
    while True:
        if is_free(directory.keeper_lock):
            if launched:
                raise EmbeddedServerError(
                    f"the server in {directory.path} did not start; {log_since(directory, log_start)}"
                )
            launch(directory)
            launched = True
        elif (record := read_record(directory)) is not None and is_ready(record.socket):
            return record.socket
        elif time.monotonic() > deadline:
            raise EmbeddedServerError(
                f"the server in {directory.path} was not ready within {READY_WITHIN:.0f} seconds; "
                f"{log_since(directory, log_start)}"
            )
        else:
            time.sleep(POLL)
