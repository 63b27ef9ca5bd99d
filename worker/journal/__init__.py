"""Event log of a task: typed events, the agent state that they reduce to, snapshots and handoff documents.

The package knows no handlers and no runtime: it reads and computes, and the run writes.

    event.py            base class of events, registry of Perdure's types
    run_events.py       events of a run: start, steps, waits, messages, end
    archive.py          closed steps and old messages that leave a state
    compaction.py       compaction of a state by an operator
    agent_events.py     events of an agent's work: plan, decisions, tools, conversation, state
    chat.py             messages of a conversation
    parsing.py          log entries to events
    registration.py     application event types
    event_redaction.py  secrets out of events
    state.py            AgentState
    reducer.py          state = reduce(events), pure
    json_patch.py       diff and apply JSON Patches (RFC 6902)
    snapshot.py         stored form of a state
    step_record.py      stored form of a step record
    tool_notes.py       notes and counts of tool calls
    failure_record.py   stored form of the failure of a step
    history.py          the state at any event; check of a snapshot against the log
    forks.py            a new task from a point in another one's log
    quoting.py          foreign text as one line or one block, for prompts and Markdown
    resumption.py       summary of what a resumed run continues from
    handoff/            handoff documents

Event types, field names and stored forms are durable data: workers of two versions share one log. Give a new field a
default, raise the version of a type whose meaning changes, and never rename either.
"""
