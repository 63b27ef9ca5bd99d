"""Agents: a class that plans, acts and finishes, run by a loop that stores its state with each step.

| module | content |
|---|---|
| `agent.py` | `Agent`, the base class |
| `handler.py` | the task handler that runs an agent |
| `loop.py` | plan, steps of the plan, replan, finish |
| `incoming.py` | unread messages into the conversation; interruption of a step by one |
| `resume_notice.py` | the notice of a resume for the user |
| `live_state.py` | the state of a run beside the reduction of its event log; checkpoints and snapshots |
| `session_turn.py` | a run that is a turn of a session: what it starts from, what it leaves |
| `state_type.py` | stored, ephemeral and input fields of a state class; applies an event to one field |
| `background.py` | a coroutine for the duration of a block |
| `session_sweeper.py` | what one worker does about the sessions of the fleet |
| `identity.py` | identity of an agent |
| `recall.py`, `resume_info.py` | `ctx.recall_step`, `ctx.resume_info` |
| `journal/` | events of agents, and the state that they reduce to |
| `context/` | the prompt of a model: layers, budgets, compaction, provider formats |
| `tools/` | tools by which a model reads its steps, log, memories, artifacts and inbox |
| `coherence/` | checks whether an agent still works on its goal |

The state has two copies. `LiveState.state` is the object that the agent changes; `LiveState.logged_state` is the
reduction of the event log, as JSON. A checkpoint event contains the difference between them, so that the log alone is
enough to restore the state. An event that is logged between checkpoints changes both copies.

A step that is cut off runs again with the state of its start. Nothing may therefore be written to `logged_state`
except through an event.
"""
