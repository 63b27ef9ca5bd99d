"""Commands on the long-term memories of agents: `perdure memory`.

commands.py  add, search, list, forget, export, import, prune, reembed
"""
