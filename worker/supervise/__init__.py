"""Supervisor: one process that runs several workers as child processes.

The supervisor imports no handler code, so user code cannot harm it. Its first child imports the app and reports the
settings that the supervisor needs. When a child ends, the supervisor reports to Redis which worker died, so that other
workers claim its deliveries at once instead of after the lease, and starts a replacement.

    config.py         settings of a supervisor, and the app's settings that the first child reports
    pool.py           WorkerPool and WorkerSlot: which children to run; restart, replace, reload
    crash_counter.py  registration, crash count and pause in Redis
    source_files.py   source files that are watched in development
    supervisor.py     start-up, signals, drain, alerts

Child processes themselves, and those that run quarantined tasks, are in worker/runtime/children.

Crashes of ordinary children without progress count towards the pause. Those of quarantine children do not: their task
is the cause.
"""
