"""The embedded server: a real redis-server for those who name none.

Every process that names a data directory shares one server in it, on a unix socket. The first one
starts it, the last one out stops it, and a process killed with SIGKILL counts as gone.

    directory.py   the data directory and the names of its files
    locks.py       file locks with a bounded wait
    binary.py      which redis-server program
    config.py      its configuration
    sockets.py     where its socket is, and one question and answer over it
    launch.py      one keeper and its server, from nothing
    keeper.py      the process that holds the server and stops it when nobody is left
    server.py      a process's share in the server
    control.py     what an operator does: start, stop, status

Four locks in the data directory, all released by the kernel when their holder dies:

| file         | kind      | held by                                         | says                         |
|--------------|-----------|-------------------------------------------------|------------------------------|
| startup.lock | exclusive | who joins, starts or stops; the leaving keeper  | nobody else changes anything |
| users.lock   | shared    | every share                                     | the server is in use         |
| keeper.lock  | exclusive | the keeper; its text names its pid and socket   | somebody looks after it      |
| server.lock  | exclusive | the keeper, the server and its forks            | somebody may touch the data  |
"""

from __future__ import annotations

from .control import ServerStatus, start, status, stop
from .server import EmbeddedServer

__all__ = ["EmbeddedServer", "ServerStatus", "start", "status", "stop"]
