"""Limits that the tasks of a namespace share: how many run at once, how often they start, what they cost.

| module | what it holds |
|---|---|
| `definition` | `Limit`, `Rate`, `Breaker`: what an app declares, and the fields that its workers publish |
| `task_limits` | the limits of one task, and their uses by a call: names, keys, costs |
| `control` | what operators set, hold and release, with notes of who did it |
| `store` | tokens: taken, renewed, released; holds; definitions published and read |

A token is a member of two sorted sets, that of its limit and that of its key; its score is the virtual time at which it
expires (lua/limits.lua).
"""
