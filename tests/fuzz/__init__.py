"""Bytes of another program, for real workers: hostile messages, mutations of every key, forgeries.

| module | what it holds |
|---|---|
| `hostile`, `gathering` | hostile stream entries, and many of them for one seed |
| `test_fuzz` | what hostile entries do to a worker process |
| `places` | every key of `queues/keys.py` |
| `mutations` | seeded mutations of keys |
| `world` | the deployment that is mutated, and its checks |
| `test_keys` | what mutations do to workers and lists |
| `search` | the search for guilty mutations |
| `forgeries` | seeded forgeries of sealed data by a writer without the key |
| `sealed` | the sealed deployment whose data is forged, and what it must never see |
| `test_forged` | what forgeries do to handlers, clients, workers and lists |
"""
