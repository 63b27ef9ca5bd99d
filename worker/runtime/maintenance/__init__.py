"""Background duties of a worker, each a coroutine that runs until it is cancelled.

    promoter.py         Promoter: moves due tasks to the ready stream; ClockMonitor
    janitor.py          Janitor: expires dead letters, idle consumers and old partitions; looks at sessions
    notices.py          NoticeDelivery: tells tasks that wait for others of their ends
    partitions.py       AssignmentWatcher: follows changes of the worker's partitions
    registration.py     Registration: publishes the worker; SettleRate, HintListener

Duties that one worker can do for the fleet are guarded by locks with a TTL (`acquire_fleet_locks`). The locks save work
and protect nothing: two workers doing the same duty at once is harmless, and the TTL bounds the delay after a crash.
"""
