"""The runtime of a worker: from a message to its settled outcome.

    worker.py            Worker: its parts, and the order in which they start and stop
    intake.py            claims and reads messages, and gives each delivery a slot
    reclaim.py           when to claim what lost workers left pending
    slots.py             the bound on concurrent runs
    executor.py          one delivery, through the stages
    stages/              each returns an outcome or continues; the handler call is the last
    outcome.py           outcomes, and the pure decision that follows an error
    settler.py           stores an outcome until Redis answers
    stopped_run.py       the handoff document and the turn of a session, stored before an outcome
    quarantine_gate.py   whether this worker may run a suspect
    webhooks.py          JSON about resumed, buried and waiting tasks
    webhook_posting.py   posts it to a URL; also imported by the supervisor, which imports no run
    shared_settings.py   settings that all workers of a namespace share
    supervisor_link.py   the worker's end of the pipes to its supervisor
    service_manager.py   notifications to systemd: ready, reloading, stopping, and its watchdog
    burst.py             work until the queues are empty
    maintenance/         background duties: promote, clean up, register
    health/              is the worker alive, connected, consuming, making progress?
    metrics/             counts and gauges for Prometheus
    children/            child processes that run workers

A worker that died is recovered by `reclaim`, `intake` and queues/delivery/consumer: pending messages are claimed, and
take the same path as new ones. This module imports nothing: a supervisor uses only `children`, and imports no app.
"""
