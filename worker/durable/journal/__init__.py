"""Event log of a task: the events of a run, step records and handoff documents. Those of agents: worker/agents/journal.

The package knows no handlers and no runtime: it reads and computes, and the run writes.

    event.py            base class of events, registry of Perdure's types
    run_events.py       events of a run: start, steps, waits, messages, end
    chat.py             messages of a conversation
    parsing.py          log entries to events
    event_redaction.py  secrets out of events
    step_record.py      stored form of a step record
    tool_notes.py       notes and counts of tool calls
    failure_record.py   stored form of the failure of a step
    quoting.py          foreign text as one line or one block, for prompts and Markdown
    resumption.py       summary of what a resumed run continues from
    handoff/            handoff documents

Event types, field names and stored forms are durable data: workers of two versions share one log. Give a new field a
default, raise the version of a type whose meaning changes, and never rename either.
"""
