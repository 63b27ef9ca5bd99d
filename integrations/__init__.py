"""Adapters for agent frameworks and web frameworks. Each module is imported only when an app asks for it.

module                extra               what it has
langgraph             langgraph           saver and store for LangGraph, and graphs as tasks
pydantic_ai           pydantic-ai         agents of Pydantic AI whose model requests and tools are steps
openai_agents         openai-agents       agents of the OpenAI Agents SDK, likewise, and a session
claude_agent_sdk      claude-agent-sdk    a store for the sessions of the Claude Agent SDK
mcp                   mcp                 tasks as tools of an MCP server, and calls of MCP tools as steps
django                django              a backend for django.tasks, and an outbox for Django
sqlalchemy            sqlalchemy          an outbox for SQLAlchemy
arq                   -                   the interface of arq: WorkerSettings, create_pool, cron
"""
