"""`perdure bench`: throughput and latency on the user's server, compared with a raw client in the same run.

    command.py   the command, its options and its table
    consent.py   consent before load, free memory, other clients
    measures.py  the measured tasks, and all measures
    raw.py       the raw client: hiredis on one connection

The limits of the raw client are measured in the same run, because absolute numbers depend on the machine. Everything
is written to a temporary namespace, which is removed also after an error or Ctrl-C.
"""
