"""HTTP API of a deployment: enqueue, follow, answer and operate tasks from other programs and languages.

    operation.py    operations: what the API and the dashboard can do, each with a role, models and an audit line
    operations/     the operations, one module per domain
    users.py        users, roles, and the file of tokens
    problems.py     problem details (RFC 9457) of refused requests and of errors
    service.py      the open producer of a deployment, its users and secrets
    binding.py      routes of the operations: inputs from path, query, headers and body; bounded bodies; responses
    openapi.py      the OpenAPI document
    router.py       the ASGI application: `router(app)`
    server.py       `perdure web run`
    extra.py        the packages that all of it needs

The package needs the extra `web`. `perdure.web` re-exports its public names.
"""
