"""Dead letters: when to stop trying, what to keep, and the way back. Knows queues, not workers."""

from .burial import DEFAULT_RETENTION, Evidence, bury, trim_letters, unreadable_id
from .letters import DeadLetter, Filter, count_letters, find_letter, list_letters
from .policy import Bury, Reason, Retry, TryAgain, after_crash, after_failure, backoff
from .replay import Replay, purge, purge_all, replay, replay_all

__all__ = [
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
    "purge",
    "purge_all",
    "replay",
    "replay_all",
    "trim_letters",
    "unreadable_id",
]
