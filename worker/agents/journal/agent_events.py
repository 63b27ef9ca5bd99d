"""Events of an agent's work: plan, decisions, tools, conversation, artifacts, state. Functions log some of them too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from ...durable.journal.chat import StoredMessage
from ...durable.journal.event import Count, Event, built_in


@built_in
class Finished(Event):
    """End of an agent that reached its goal."""

    type: Literal["finished"] = "finished"
    summary: str = ""


@built_in
class Decided(Event):
    """Choice and its reason. alternatives: options that were not chosen."""

    type: Literal["decided"] = "decided"
    choice: str
    reasoning: str = ""
    alternatives: tuple[str, ...] = ()


@built_in
class Discovered(Event):
    """Fact and its source."""

    type: Literal["discovered"] = "discovered"
    fact: str
    source: str = ""


@built_in
class MessageAdded(Event):
    """Message added to the conversation."""

    type: Literal["message_added"] = "message_added"
    message: StoredMessage


@built_in
class Withdrawn(Event):
    """Messages, decisions and discoveries of a step that was called again and did not add them again.

    numbers: of the events that had added them.
    """

    type: Literal["withdrawn"] = "withdrawn"
    numbers: tuple[int, ...] = ()


@built_in
class Compacted(Event):
    """Summary that replaced the oldest messages of the conversation.

    Attributes:
        first: Number of the first event that the summary replaces.
        last: Number of the last one.
        messages: Number of messages that it replaces.
        kept: Instructions of the user, among these messages, that stay before the summary.
    """

    type: Literal["compacted"] = "compacted"
    first: Count
    last: Count
    messages: Count
    summary: str = ""
    kept: tuple[StoredMessage, ...] = ()


@built_in
class Repaired(Event):
    """Placeholder results for tool calls that a crash had left without one. calls: their ids."""

    type: Literal["repaired"] = "repaired"
    calls: tuple[str, ...] = ()


@built_in
class ArtifactSaved(Event):
    """Saved artifact. hash: SHA-256 of its bytes, in hexadecimal. size: bytes."""

    type: Literal["artifact_saved"] = "artifact_saved"
    name: str
    hash: str
    size: Count
    media_type: str = "application/octet-stream"


@built_in
class WorkspaceSaved(Event):
    """Files of the workspace that changed and were saved.

    Attributes:
        changed, removed: Paths of files, links and folders, which end in `/`: at most 50 of each.
        more: Number of those that are not named.
        files: Number of files and links in the workspace.
        size: Bytes of all of them.
        manifest, manifest_size: Hash and bytes of the manifest; empty if an earlier version saved them.
    """

    type: Literal["workspace_saved"] = "workspace_saved"
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    more: Count = 0
    files: Count = 0
    size: Count = 0
    manifest: str = ""
    manifest_size: Count = 0


def saved_link(kind: str, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the link of the workspace that an event of this type has; None if it has none."""
    if kind == "forked":
        link: dict[str, Any] | None = data.get("workspace")
        return link
    if kind != "workspace_saved" or not data.get("manifest"):
        return None
    names = {"hash": "manifest", "size": "manifest_size", "files": "files", "bytes": "size"}
    return {"v": 1} | {name: data.get(field, 0) for name, field in names.items()}


@built_in
class IdentityRead(Event):
    """Identity with which the agent works from here on. number: its version, 0 for that of its class."""

    type: Literal["identity_read"] = "identity_read"
    agent: str
    number: Count = 0
    former: Count | None = None
    by: str = ""


@built_in
class IncoherenceFound(Event):
    """Finding of a coherence check.

    Attributes:
        policy: Action that the settings prescribe.
        key: Hash that equal findings share, by which a person dismisses them.
    """

    type: Literal["incoherent"] = "incoherent"
    check: str
    detail: str = ""
    policy: str = "warn"
    key: str = ""


@built_in
class Judged(Event):
    """Verdict of the judge of a coherence policy. work: tool calls and steps until then. objection: empty if none."""

    type: Literal["judged"] = "judged"
    work: Count = 0
    objection: str = ""


@built_in
class Dismissed(Event):
    """Dismissal of a finding by a person. event: number of the finding's event. finding: its key."""

    type: Literal["dismissed"] = "dismissed"
    event: Count = 0
    finding: str = ""


@built_in
class Corrected(Event):
    """Correction of the state by a person; `changes` holds the patch. paths: the fields. by: name of the person."""

    type: Literal["corrected"] = "corrected"
    paths: tuple[str, ...] = ()
    by: str = ""


@built_in
class CorrectionRefused(Event):
    """Correction that was not applied. wanted: its values by path, empty if they are too large for an event."""

    type: Literal["correction_refused"] = "correction_refused"
    wanted: dict[str, Any] = Field(default={})
    by: str = ""
    why: str = ""


@built_in
class Changed(Event):
    """Change of the state by the agent's own code; `changes` holds the patch."""

    type: Literal["changed"] = "changed"


@built_in
class Archived(Event):
    """Departure of the oldest closed steps and messages from the state; `changes` has the effect.

    Attributes:
        steps: Keys of the steps, each of which has a record of its own.
        messages: Number of messages.
    """

    masked: ClassVar[bool] = True
    type: Literal["archived"] = "archived"
    steps: tuple[str, ...] = ()
    messages: Count = 0


@built_in
class LogBase(Event):
    """State before this event, with which the log may start: see `Agent.keep_events`.

    Attributes:
        retired: Number of archived steps whose records were dropped with it.
    """

    masked: ClassVar[bool] = True
    type: Literal["log_base"] = "log_base"
    agent: str
    state: dict[str, Any]
    retired: Count = 0


@built_in
class Snapshot(Event):
    """Snapshot of the whole state in the checkpoint. at: number of the last event in it. size: bytes."""

    type: Literal["snapshot"] = "snapshot"
    at: Count
    size: Count


@built_in
class Rewound(Event):
    """Continuation from before a gap in the log. first, last: numbers of the events that the state does not contain."""

    type: Literal["rewound"] = "rewound"
    first: Count
    last: Count
