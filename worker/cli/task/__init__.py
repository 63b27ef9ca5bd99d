"""Commands on tasks: `perdure task`.

commands.py  list, show, result, watch, cancel, artifact; the table of all commands
events.py    events
history.py   state, fork, handoff, export, import
inbox.py     send, inbox
versions.py  versions
"""
