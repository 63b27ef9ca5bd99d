"""`perdure demo`: recovery from killed workers and a replayed dead letter, shown on real files.

    command.py    the command and its options
    scenario.py   sequence of the demo, and its temporary workspace
    app.py        the tasks
    worker.py     entry point of a worker process
    processes.py  starting and killing workers
    journal.py    step runs, logged to a file outside Redis
    evidence.py   claims, counted from what the run left behind
    screen.py     the final screen

Evidence must not come from the code under test alone: the journal is written by the steps themselves, and exit
statuses come from the operating system.
"""
