"""Connections to Redis: one server, Sentinel or Cluster, with TLS or without.

    module        contents
    gateway       `Gateway`: every command and script is submitted here; retries after a lost reply
    address       server addresses parsed from URLs
    clients       redis-py clients for an address; translation of errors
    server_check  check of the server at connect: version, commands, known holes, eviction, persistence
    releases      releases of Redis and Valkey with fixes that matter here
    pipelining    connection that pipelines the commands of one event-loop tick
    blocking      dedicated connection for blocking reads, which can be interrupted
    replication   writes that replicas confirm (WAIT)
    sentinel      connections that follow the primary; reaction to a failover
    tls           connections that read their certificates each time they connect
    cluster       the same gateway over the nodes of a Redis Cluster
    scripts       Lua scripts, called by digest
    threadsafe_calls  calls from threads without an event loop
    rights        rights of the Redis users that run Perdure
    large_values  values that are stored in chunks
    large_results  results of steps, copied with their task
    value_store   protocol of the store outside of Redis for the largest values
    backoff       delays between attempts; the loop that waits while Redis is unavailable

The gateway repeats a command whose reply was lost only if it is repeatable: a script must have the same effect when it
runs twice with the same arguments, or be called by `run_once`. Errors of redis-py do not leave this package:
`translated` turns them into `Unavailable` (transient) and `Refused`. Commands sent to a cluster must be in the table of
`cluster/hash_slots.py`.
"""
