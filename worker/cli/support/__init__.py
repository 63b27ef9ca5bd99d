"""Parts that several commands share.

    runner.py              makes a command of a function, and prints the rows, document or lines that it returns
    output.py              columns, tables and fields, JSON, messages and progress bars
    errors.py              Failed, Misuse, exit codes and remedies
    connection.py          connection options, the open Producer or task of a command, lookup of tasks and queues
    options.py             other shared options, their parsers, files to read and to write
    app_loader.py          import of the APP argument
    probe.py               options of the health port
    events_text.py         an event as one line of text
    worker_process.py      `worker run`: one worker in this process
    supervisor_process.py  `worker run --processes`: a supervisor in this process
    temporary.py           clean-up after Ctrl-C, a temporary namespace

Raise `Failed` (exit code 1) or `Misuse` (exit code 2) for everything that the user can fix, with a text that names the
object and the remedy. An unexpected exception keeps its traceback. Print data by returning it, or with the functions of
output.py: both escape control characters in text from tasks.
"""
