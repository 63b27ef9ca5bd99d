"""Key-value store: versioned entries in namespaces, for programs and for tasks.

| module | content |
|---|---|
| `entries` | entries of a namespace: read, list, and change in atomic batches |
| `names` | names of namespaces, and the list of them |
"""
