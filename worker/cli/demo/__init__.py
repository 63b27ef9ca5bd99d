"""`perdure demo`: recovery from killed workers and a replayed dead letter, shown on real files.

    command.py    the command and its output
    scenario.py   sequence of the demo, and its temporary folder
    app.py        the tasks
    processes.py  worker processes, and their kills
    journal.py    step runs, logged to a file outside Redis
    evidence.py   claims, counted from what the run left behind

Evidence must not come from the code under test alone: the journal is written by the steps themselves, and exit
statuses come from the operating system.
"""
