"""The stages of a delivery: each returns the outcome, or None to continue with the next; the handler call is the last.

| module | what it does |
|---|---|
| `execution` | the delivery that the stages handle, and the type of a stage |
| `previous_run` | load what earlier runs recorded; set and log the resumption |
| `task_lookup` | find the registered task; decrypt its checkpoint; decrypt and decode its arguments |
| `crash_limit` | bury or delay a task that keeps crashing |
| `successor` | finish a continuation (`ctx.continue_as`) that a previous run decided on |
| `handler_call` | run the handler and decide the outcome from how it ended |

The quarantine gate, one level up, is a stage as well. `executor.py` has the order: a first delivery skips the stages
that need a history. To add a stage, write a class or function of the type `Stage` and put it into that tuple. A worker
may die at any await of a stage: what a stage writes must be fenced by the delivery, and harmless when repeated.
"""
