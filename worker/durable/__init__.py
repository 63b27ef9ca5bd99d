"""Durable execution of a handler: the run, its checkpoint, and the context that a handler works with.

    run.py                one run: lifecycle, event log
    handler_task.py       the asyncio task of a handler, and its cancellation
    stop_reasons.py       why a run stops, and what follows
    extras.py             objects of optional parts, of a run or a worker
    json_types.py         what a type's JSON is read back as
    value_loss.py         warnings about values that JSON changes
    steps/                ctx.step: run once, record, return from the record
    step_caller.py        step, tool, inbox and ask of a context and of its options
    checkpoint_writer.py  the one writer of a run's checkpoint
    event_calls.py        events that are logged once; steps that a run did not ask for
    step_files.py         the files of a step, as its record sees them
    messaging.py          ctx.inbox, ask, send
    journal/              events of a run, step records, handoff documents
    sync/                 the thread of a handler that is a plain function
    continuation.py       ctx.continue_as
    task_capacity.py      ctx.capacity: time, context window, load
    spending.py           ctx.spend: charges of a run, and what follows when a budget is used up
    spent.py              the arguments of ctx.spend
    budget_left.py        what is left of the budgets of a task
    prices.py             prices of model calls

What a handler got once, it gets again after a crash: every call above writes a record under a key that depends only on
the order of the calls, and a resumed run returns that record. A new call must do the same, in one write with its event,
through `run.recorder`, which is fenced. worker/durable/journal/step_record.py has the stored form.
"""
