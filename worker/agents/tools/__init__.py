"""Ready-made tools by which a model reads what does not stand in its prompt.

| module | content |
|---|---|
| `toolbox.py` | `AgentTools`: definitions for providers, and the call of a tool as a durable step |
| `readers.py` | reads of the tools, as bounded text |

All text that a tool returns is data of others: it stands quoted in the result. A tool reads the task that runs it, its
agent's memories and its own artifacts, whatever the model asks for.
"""
