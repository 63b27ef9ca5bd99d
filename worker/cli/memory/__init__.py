"""Commands on the long-term memories of agents: `perdure memory`.

commands.py  add, search, list, forget
admin.py     export, import, prune, reembed
"""
