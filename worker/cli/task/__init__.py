"""Commands on tasks: `perdure task`.

commands.py  the table of all commands
listing.py   list
show.py      show, why
outcome.py   result, watch, cancel
events.py    events
history.py   state, fork, handoff, versions
correct.py   correct, compact, dismiss, resolve
inbox.py     send, inbox
answers.py   answer, waiting
values.py    values, update
transfer.py  export, import
"""
