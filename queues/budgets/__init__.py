"""Budgets: what tasks may spend in all, and what follows when it is used up.

| module | content |
|---|---|
| `definition` | budgets as they are declared, and the ones of one task: what is charged where |
| `store` | ledgers in Redis: charges, raises and resets |
"""
