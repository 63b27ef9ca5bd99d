"""`perdure bench`: throughput, latency and recovery on the user's server, beside bare commands in the same run.

    command.py   the command, its options and its table

The limits are measured in the same run with redis-py, because absolute numbers depend on the machine. Everything is
written to a temporary namespace, which is removed also after an error or Ctrl-C.
"""
