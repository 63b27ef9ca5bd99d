"""Applications, durable handlers, workers and the command line.

app.py              App: tasks, agents, settings, middleware
registry.py         the tasks of an app
task.py             Task: enqueue and call options
agent_task.py       the same for agents
session.py          Session: a conversation with an agent
arguments.py        arguments of a task to JSON and back
handlers.py         the handler of a task, async or in a thread
sync_producer.py    producers for code without an event loop
outbox.py           tasks of transactions of a database, and the relay that sends them
app_loops.py        event loops in which a synchronous producer runs
settings.py, log.py settings; logging
errors.py           error tree
loop_errors.py      background loops that outlive the error of one item
resume_warning.py   ResumeWarning
context.py          Context: the public `ctx`; sync_context.py, sync_parts.py: of a plain function
middleware.py       hooks around enqueue, run, step and settle
durable/            run, steps, event log: what every task needs
runtime/            from a message to a settled outcome
supervise/          processes that run workers
agents/             agents: loop, state, prompt
memory/, artifacts/, workspace/  what tasks keep outside of Redis
transfer/           export and import of a task
testing/            `perdure.testing` and the pytest plugin
cli/                the program `perdure`
"""
