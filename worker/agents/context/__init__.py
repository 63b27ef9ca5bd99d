"""Context of a model: a prompt built from the state of a task, in a form that the model's provider accepts.

A prompt has its layers in this order. What stays the same comes first, because providers cache the start of a prompt:

    system    identity, rules                                                 the same in all prompts
    stable    profile, memories for the goal, note of the former task; goal   the same in all prompts of a task
    turns     the user's first instructions, a summary, the latest messages   only grows, until turns leave it
    brief     what the state says now (brief.py)                              computed at each call
    inbox     messages given to `build`

- The brief comes from the live state alone. What the former run left is part of it until the first step after the
  resume is recorded, and repeats nothing that the state says.
- Profile and memories are chosen once per task and stored in its checkpoint, so that a resumed run has the same text.
- The messages of one role in a row are not merged into one text: the brief must not change the message before it.
- If the turns do not fit and no summarizer is given, they leave in blocks of half of their room.
- Nothing is left out silently: each section that is cut counts and names what is missing, and how to get it.

| module | content |
|---|---|
| `builder.py` | `ContextBuilder`: asks a model with the context of the running task |
| `background.py` | profile and memories, chosen once |
| `layers.py` | assembles the layers of a prompt within their token budgets; pure |
| `brief.py` | the sections of the brief; pure |
| `compaction.py` | replaces the oldest messages with a summary, once |
| `conversation.py` | exchanges, turns, and results for interrupted tool calls |
| `providers.py` | message formats of Anthropic and OpenAI |
| `prompt.py` | `Prompt`, `Budgets`, token counters |

A tool call and its results are one exchange. Compaction and budgets drop whole exchanges only, because providers
reject a call without a result and a result without a call.

Only the identity layer has the role `system`. All other text may come from tools, senders or earlier tasks, and is
sent as the user's; in the brief each entry is one quoted line (`journal/quoting.py`).
"""
