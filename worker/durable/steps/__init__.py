"""Steps of a handler: run once, recorded, returned from the record.

    execution.py  run_step: match a call to its record, or run it and record its result
    current.py    Step and current_step: the running step, as its function sees it
    failures.py   failures of steps as history: what is stored of them, and when
    recorded_errors.py  errors as data, and errors that are made from it
    keys.py       keys of steps, and the records that calls are matched to
    matching.py   match a call to its record: of a step, and of what logs, sends or reads
    tool_calls.py  calls of tools, logged with their step
    codec.py      results as JSON and back; hash of arguments
    calls.py      call a step's function: in the event loop, or in a thread
    variables.py  context variables that a step sets are set back after it
    equal_calls.py  equal calls by concurrent asyncio tasks
    threads.py    bounded threads for sync functions
    step_thread.py  one call in a thread, and the late ones, whose step was given up

This module imports nothing: run.py uses keys.py and threads.py, and the other modules use run.py.
"""
