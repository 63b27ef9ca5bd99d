"""Parts that several commands share.

    connection.py          connection options, the open Producer for a command, lookup of tasks and queues
    marked.py              secret arguments by the published definitions of their tasks
    options.py             other shared options, their parsers, the file of --output
    app_loader.py          import of the APP argument
    live.py                a live view of a list
    probe.py               options of the health port
    output.py              tables, JSON, messages and progress bars
    terminal.py            escapes of what a terminal would interpret
    events_text.py         an event as one line of text
    errors.py              Failed, Misuse, exit codes and remedies
    worker_process.py      `worker run`: one worker in this process
    supervisor_process.py  `worker run --processes`: a supervisor in this process
    temporary.py           clean-up after Ctrl-C, a temporary namespace

Raise `Failed` (exit code 1) or `Misuse` (exit code 2) for everything that the user can fix, with a text that names the
object and the remedy. An unexpected exception keeps its traceback. Print data with the functions of output.py only:
they escape control characters in text from tasks.
"""
