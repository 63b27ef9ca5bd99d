"""Errors of artifacts."""

from __future__ import annotations

from ...queues import PerdureError

__all__ = [
    "ArtifactDamaged",
    "ArtifactError",
    "ArtifactMissing",
    "ArtifactTooLarge",
    "BadArtifactName",
    "StoreUnavailable",
]


class ArtifactError(PerdureError):
    """Base of errors of artifacts. The message names the artifact and its task."""


class BadArtifactName(ArtifactError, ValueError):
    """The name of an artifact is not valid."""

    def __init__(self, name: object, problem: str) -> None:
        shown = repr(name) if len(repr(name)) <= 80 else f"{repr(name)[:77]}..."
        super().__init__(f"artifact name {shown} is not valid: {problem}")
        self.name = name


class ArtifactTooLarge(ArtifactError, ValueError):
    """An artifact exceeds the size limit. limit: bytes."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"{what} has more than {limit} bytes: save it in parts, or raise PERDURE_ARTIFACT_LIMIT")
        self.limit = limit


class ArtifactMissing(ArtifactError, LookupError):
    """The bytes of an artifact are not in the store. hash: SHA-256 of the bytes that were saved."""

    def __init__(self, what: str, digest: str, place: str) -> None:
        super().__init__(
            f"{what}: its bytes (SHA-256 {digest}) are not in {place}: they were removed, or saved by a worker with "
            "another store (PERDURE_ARTIFACTS; workers on several hosts need a store that all of them can reach)"
        )
        self.hash = digest


class ArtifactDamaged(ArtifactError):
    """The bytes in the store differ from the saved ones. hash: SHA-256 of the bytes that were saved.

    The message tells nothing of what was found instead, which may be another user's.
    """

    def __init__(self, what: str, digest: str, place: str) -> None:
        super().__init__(
            f"{what} is damaged: object {digest} in {place} does not have the bytes that were saved; nothing was "
            "overwritten; restore the object from a copy, or remove it and save the artifact again"
        )
        self.hash = digest


class StoreUnavailable(ArtifactError):
    """The artifact store cannot be reached, is full, or refuses access."""

    def __init__(self, what: str, verb: str, place: str, cause: BaseException) -> None:
        super().__init__(
            f"{what} cannot be {verb} the artifact store at {place}: {type(cause).__name__}: {cause}; check that the "
            "store (PERDURE_ARTIFACTS) exists, has free space, and is accessible to this process"
        )
