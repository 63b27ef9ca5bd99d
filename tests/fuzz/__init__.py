"""Bytes of another program, for real workers: hostile messages, and mutations of every key.

| module | what it holds |
|---|---|
| `hostile`, `gathering` | hostile stream entries, and many of them for one seed |
| `test_fuzz` | what hostile entries do to a worker process |
| `places` | every key of `queues/keys.py` |
| `mutations` | seeded mutations of keys |
| `world` | the deployment that is mutated, and its checks |
| `test_keys` | what mutations do to workers and lists |
| `search` | the search for guilty mutations |
"""
