"""Applications, durable handlers, workers and the command line.

app.py              App: tasks, agents, settings, middleware
registry.py         the tasks of an app
task.py             Task: enqueue and call options
agent_task.py       the same for agents
session.py          Session: a conversation with an agent
arguments.py        arguments of a task to JSON and back
handlers.py         the handler of a task, async or in a thread
sync_producer.py    producers for code without an event loop
app_loops.py        event loops in which a synchronous producer runs
settings.py, log.py settings; logging
identity.py         identity of an agent
errors.py           error tree
loop_errors.py      background loops that outlive the error of one item
resume_warning.py   ResumeWarning
durable/            what a handler works with: run, context, steps
runtime/            from a message to a settled outcome
supervise/          processes that run workers
agent/, journal/    agents: loop, state, prompt; event log and handoff documents
memory/, artifacts/, workspace/  what tasks keep outside of Redis
transfer/           export and import of a task
testing/            `perdure.testing` and the pytest plugin
cli/                the program `perdure`
"""
