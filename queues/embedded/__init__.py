"""Embedded server: a real Valkey or Redis server for processes that name no other server.

All processes with the same data directory share one server, on a unix socket. The first process starts it, and it stops
when the last one has left; a process killed with SIGKILL counts as gone.

    module      contents
    server      `EmbeddedServer`: the share of one process
    control     start, stop and status for operators
    launch      the configuration, and the start of the watchdog
    watchdog    parent process of the server; stops it when no share is left
    files       the data directory, its file locks and its socket

Four locks in the data directory, all released by the kernel when their holder dies:

| file         | kind      | holder                                                      | meaning                     |
|--------------|-----------|-------------------------------------------------------------|-----------------------------|
| startup.lock | exclusive | a process that joins, starts or stops; a stopping watchdog  | no other process may change |
| users.lock   | shared    | every share                                                 | the server is in use        |
| keeper.lock  | exclusive | the watchdog; the file contains its pid and socket          | the server is supervised    |
| server.lock  | exclusive | the watchdog, the server and its forks                      | the data may be written     |

Processes of older versions share these files and locks, so their names and contents must not change. `watchdog` runs by
its path without the package: it must import the standard library only.
"""
