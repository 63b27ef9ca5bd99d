"""Tasks as tools of an MCP server, and tools of MCP servers as steps. It needs the extra `mcp`.

    tool_list.py        the tools: names, descriptions and schemas, from the catalog of tasks
    tool_results.py     results of tools: quoted with their origin, bounded; results that a task makes itself
    elicitation.py      questions of tasks as elicitations, and the answers of clients
    tool_server.py      the requests: tools/list, tools/call, and the tasks extension (SEP-2663)
    mcp_transports.py   the server on stdio, and as an ASGI application with bearer tokens
    remote_tools.py     tools of other servers in a handler: each call is a step

`perdure.integrations.mcp` re-exports the public names.
"""
