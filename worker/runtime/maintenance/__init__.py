"""Background duties of a worker, each a coroutine that runs until it is cancelled.

    promoter.py         Promoter: moves due tasks to the ready stream
    janitor.py          Janitor: expires dead letters, idle consumers and old partitions
    partitions.py       AssignmentWatcher: follows changes of the worker's partitions
    cancel_listener.py  CancelListener: passes on that a running task is to be cancelled
    clock_monitor.py    ClockMonitor: logs restarted leases and steps of the clock of Redis
    session_sweeper.py  SessionSweeper: stores lost tasks of turns, wakes sessions, deletes idle ones
    registration.py     Registration: publishes the worker; SettleRate
    version_waker.py    VersionWaker: makes tasks due that older workers could not run

Duties that one worker can do for the fleet are guarded by locks with a TTL (`acquire_fleet_locks`). The locks save work
and protect nothing: two workers doing the same duty at once is harmless, and the TTL bounds the delay after a crash.
"""
