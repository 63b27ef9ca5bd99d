"""Commands on tasks: `perdure task`.

commands.py  list, show, result, watch, cancel, artifact; the table of all commands
events.py    events
history.py   state, fork, handoff
compact.py   compact
inbox.py     send, inbox
transfer.py  export, import
versions.py  versions
"""
