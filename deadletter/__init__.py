"""Dead letters: retry policy, burial, listing and replay. The package imports queues, and no workers.

| module | what it holds |
|---|---|
| `policy` | retry policy, backoff, reasons; pure |
| `burial` | the script that buries a task, with evidence of its error |
| `error_text` | text of foreign exceptions, whose methods may do anything |
| `letters` | dead letters: list, filter, find, count |
| `replay` | replay and purge |
| `lua/` | one script per atomic act |

Before a change: a reason is stored as text, and earlier versions' words are still read (`Reason._missing_`).
"""
