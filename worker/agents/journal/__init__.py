"""Journal of agents: the events of their work, and the state that these reduce to.

    agent_events.py  events of an agent's work: plan, decisions, conversation, state
    registration.py  application event types
    state.py         AgentState
    reducer.py       state = reduce(events), pure
    json_patch.py    diff and apply JSON Patches (RFC 6902)
    snapshot.py      stored form of a state
    history.py       the state at any event; check of a snapshot against the log
    archive.py       closed steps and old messages that leave a state
    compaction.py    compaction of a state by an operator
    forks.py         a new task from a point in another one's log
    draft.py         a handoff document from the state, the latest events and the checkpoint

Event types, field names and stored forms are durable data, see worker/durable/journal.
"""
