"""Why a task was given up."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Reason"]


class Reason(StrEnum):
    """Every dead letter has one of these."""

    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    """Its handler failed as often as it may."""
    NOT_RETRYABLE = "not_retryable"
    """Its handler raised an error that no further attempt can mend."""
    CRASH_LOOP = "crash_loop"
    """Its deliveries ended without any outcome more often than they may: it is suspected of killing workers."""
    TIMEOUT = "timeout"
    """Its last attempt ran out of time."""
    UNREADABLE = "unreadable"
    """The message is not an envelope, or one of a future version. Its raw fields are kept."""
    INVALID_ARGUMENTS = "invalid_arguments"
    """Its arguments do not fit its handler."""
    UNKNOWN_TASK = "unknown_task"
    """No worker that looked at it knew its name."""
    UNSERIALISABLE_RESULT = "unserialisable_result"
    """A result that cannot be stored as JSON, or is over the size limit."""
    SEALED = "sealed"
    """Its arguments or its checkpoint are sealed, and no worker that looked at them could open them."""
    INCOHERENT = "incoherent"
    """A check found that its agent no longer knew what it was doing."""
    IN_DOUBT = "in_doubt"
    """A risky step was cut off, and whether its effect happened is for a person to find out."""
