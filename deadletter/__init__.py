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

from .burial import DEFAULT_RETENTION, Evidence, bury, unreadable_id
from .letters import DAMAGED, DeadLetter, Filter, count_letters, find_letter, list_letters
from .policy import Bury, Reason, Retry, TryAgain, after_crash, after_failure, backoff, must_quarantine
from .replay import Replay, purge, purge_all, replay, replay_all, trim_letters

__all__ = [
    "DAMAGED",
    "DEFAULT_RETENTION",
    "Bury",
    "DeadLetter",
    "Evidence",
    "Filter",
    "Reason",
    "Replay",
    "Retry",
    "TryAgain",
    "after_crash",
    "after_failure",
    "backoff",
    "bury",
    "count_letters",
    "find_letter",
    "list_letters",
    "must_quarantine",
    "purge",
    "purge_all",
    "replay",
    "replay_all",
    "trim_letters",
    "unreadable_id",
]
