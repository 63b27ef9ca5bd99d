"""Share of a process in the server of one data directory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import EmbeddedServerError
from .files import POLL, DataDirectory, exclusive, full_disk, is_free, is_ready, shared, socket_path
from .launch import STOPPED_WITHIN, launch, log_since, log_size, read_record

READY_WITHIN = 120.0  # seconds from the start until the data is loaded: about ten gigabytes


class EmbeddedServer:
    """A share in the server of one data directory; the server runs as long as any process holds a share.

    The share ends with `leave` or with the process, even if that is killed. A forked child also holds its parent's
    share until it leaves or ends. Several shares of one process are independent. All methods block, for tens of
    milliseconds when the server must be started; call them from a thread if an event loop runs.
    """

    def __init__(self, directory: Path, *, ready_within: float = READY_WITHIN) -> None:
        """ready_within: seconds that `ensure` waits for a server that is starting or loading its data."""
        self._ready_within = ready_within
        self._directory = DataDirectory(directory)
        self._share: int | None = None
        self._socket: Path | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def socket(self) -> Path:
        """The server's unix socket, as found by `ensure`; before that, the path at which a new one is made."""
        return self._socket or socket_path(self._directory)

    def ensure(self) -> Path:
        """Acquire the share, and return the socket of a server that has loaded its data.

        Starts the server if it does not run, also after it was killed. Takes a fraction of a millisecond if it runs.

        Raises:
            EmbeddedServerError: the directory is not usable, no program can read its data, or the server did not
                start; the message quotes its log. This object then holds no share.
        """
        with self._guard():
            try:
                self._directory.prepare()
                with exclusive(self._directory.startup_lock, READY_WITHIN + STOPPED_WITHIN):
                    self._hold_share()
                    self._socket = _running_server(self._directory, self._ready_within)
            except EmbeddedServerError as error:
                self._drop_share()
                if (full := full_disk(self._directory.path)) is None:
                    raise
                raise EmbeddedServerError(f"{full}: free space there; {error}") from error
            except BaseException:
                self._drop_share()
                raise
            return self._socket

    def leave(self) -> None:
        """Release the share, without waiting. The watchdog stops the server after the last one."""
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
        if self._pid != os.getpid():  # after a fork another thread may have held the lock
            self._pid, self._lock = os.getpid(), threading.Lock()
        return self._lock

    def _hold_share(self) -> None:
        if self._share is not None:
            if os.fstat(self._share).st_nlink:
                return
            self._drop_share()  # the directory was removed, and no watchdog checks this lock
        self._share = shared(self._directory.users_lock, STOPPED_WITHIN)

    def _drop_share(self) -> None:
        if self._share is not None:
            os.close(self._share)  # without unlocking: a forked child may still use it
            self._share = None


def _running_server(directory: DataDirectory, ready_within: float) -> Path:
    """Return the socket of the running server; start it if necessary. The caller holds the startup lock and a share."""
    deadline = time.monotonic() + ready_within
    log_start = log_size(directory)
    launched = False
    while True:
        if is_free(directory.watchdog_lock):
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
                f"the server in {directory.path} was not ready within {ready_within:g} seconds; "
                f"{log_since(directory, log_start)}"
            )
        else:
            time.sleep(POLL)
