"""Steps of a handler: run once, recorded, returned from the record.

    execution.py  run_step: match a call to its record, or run it and record its result
    current.py    Step and current_step: the running step, as its function sees it
    keys.py       keys of steps, and the records that calls are matched to
    matching.py   match a call to its record: of a step, and of what logs, sends or reads
    options.py    options of a step
    codec.py      results as JSON and back; hash of arguments
    threads.py    bounded threads for sync functions

This module imports nothing: run.py uses keys.py and threads.py, and the other modules use run.py.
"""
