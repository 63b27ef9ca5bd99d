"""`perdure backup`, `perdure restore` and `perdure migrate`: the data of a namespace as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ...queues.errors import PerdureError
from ...queues.migrations import migrate as migrate_namespace
from ...queues.migrations import plan_migration
from ...queues.private_files import replaced_file
from ...queues.producer import Producer
from ..backup.backup_file import BackupError, BackupWriter
from ..backup.dump import backup_header, dump, signature
from ..backup.load import check_restore
from ..backup.load import restore as restore_namespace
from .support.connection import connected, where
from .support.errors import Failed
from .support.output import Bar, StderrText, confirm, timestamp
from .support.runner import Output

_REFUSED = "every process refuses the namespace until '{}' is given again and has ended"

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="File of the backup.")]


@connected
async def backup(
    producer: Producer,
    file: FileArgument,
    *,
    live: Annotated[bool, typer.Option("--live", help="Read the data while workers run.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> Output:
    """Write the data of the namespace to a file, for 'perdure restore'.

    Stop workers and producers first: what changes while it is read makes the
    command fail. With --live it may change, and a task may then run a step
    again that it recorded meanwhile. Encrypted data stays encrypted. Not in
    the file: artifacts and memories, which are stored elsewhere, and keys.

    Example: perdure backup shop.backup
    """
    gateway, namespace = producer.gateway, producer.namespace
    with _explained(file):
        header = await backup_header(gateway, namespace, live=live)
        before = await signature(gateway, namespace)
        with replaced_file(file, new=not force) as out, Bar("backup", rest="no file was written") as bar:
            with BackupWriter(out, header) as writer:
                async for keys in dump(gateway, namespace, writer):
                    bar.advance(keys - bar.done)
            after = await signature(gateway, namespace)
            changed = sorted(queue for queue in after if before.get(queue) != after[queue])
            if changed and not live:
                raise BackupError(
                    f"queues {', '.join(changed)} changed while they were read: stop producers, or use --live; no file "
                    "was written"
                )
    size = file.stat().st_size
    return Output(
        {"file": str(file), "keys": writer.keys, "bytes": size, "live": live, "changed": changed},
        StderrText(f"wrote {writer.keys:,} keys {where(producer)} to {file} ({size:,} bytes)"),
        notes=[f"queues {', '.join(changed)} changed meanwhile" if changed else None],
    )


@connected
async def restore(
    producer: Producer,
    file: FileArgument,
    *,
    replace: Annotated[bool, typer.Option("--replace", help="Delete the data that the namespace has.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --replace.")] = False,
) -> Output:
    """Write a backup into a namespace without data.

    Stop workers and producers first. The file is checked first. Until the
    end, every process refuses the namespace, also producers that are
    connected, for the queues that are known here; a restore that was
    interrupted is given again. Times are those of the backup: what has expired since is left out, and what became due
    runs at once.

    Example: perdure restore shop.backup
    """
    gateway, namespace = producer.gateway, producer.namespace
    with _explained(file):
        header = await check_restore(gateway, namespace, file, replace=replace)
        if replace and not yes and not confirm(f"Delete all data {where(producer)}, and restore {file}?"):
            raise Failed("nothing was restored")
        with Bar("restore", header["keys"], rest=_REFUSED.format("perdure restore")) as bar:
            try:
                async for keys in restore_namespace(gateway, namespace, file, header, replace=replace):
                    bar.advance(keys - bar.done)
            except PerdureError as error:
                raise Failed(
                    f"the restore has not ended: {str(error).rstrip('.')}; {_REFUSED.format('perdure restore')}; to "
                    "give it up, restore another backup, or delete the keys of the namespace"
                ) from error
    made = timestamp(header["time"])
    return Output(
        {"file": str(file), "keys": header["keys"], "time": header["time"], "live": header["live"]},
        StderrText(f"restored {header['keys']:,} keys of {made} {where(producer)}"),
    )


@connected
async def migrate(
    producer: Producer,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be migrated.")] = False,
) -> Output:
    """Migrate the data of the namespace to the format of this release.

    A release that needs it says so, and its changelog does. Stop all workers
    and producers first, and make a backup. Until the end, every process
    refuses the namespace; a migration that was interrupted is given again.

    Example: perdure migrate --dry-run
    """
    gateway, namespace = producer.gateway, producer.namespace
    needed = await plan_migration(gateway, namespace)
    done = 0
    if not dry_run:
        with Bar("migration", rest=_REFUSED.format("perdure migrate")) as bar:
            async for _, count in migrate_namespace(gateway, namespace):
                bar.advance(count)
                done += count
    steps = [{"from": migration.source, "to": migration.source + 1, "changes": migration.text} for migration in needed]
    lines = [f"format {migration.source} to {migration.source + 1}: {migration.text}" for migration in needed]
    if not needed:
        lines = [f"nothing to migrate {where(producer)}"]
    return Output({"migrations": steps, "keys": done, "dry_run": dry_run}, *(StderrText(text) for text in lines))


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Translate errors of the file and of the namespace to one sentence."""
    try:
        yield
    except BackupError as error:
        raise Failed(str(error)) from error
    except FileExistsError as error:
        raise Failed(f"{file} exists already: choose another name, or use --force") from error
    except OSError as error:
        raise Failed(f"could not use {file}: {error.strerror or error}") from error
