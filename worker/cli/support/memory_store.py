"""Options that select a memory store, and the open store for a command. No Redis is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import anyio
import typer

from ...memory.factory import make_store
from ...memory.hybrid import HybridStore
from ...settings import Settings, load_settings
from .connection import warn_of_password
from .options import with_options

P = ParamSpec("P")

_PANEL = "Memory store"

StorePlace = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="PLACE",
        help="File, or postgresql://... Default: PERDURE_MEMORY, then memory.sqlite3 in the data folder. Give a URL "
        "with a password by PERDURE_MEMORY: all users of a machine can read command lines.",
        rich_help_panel=_PANEL,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Data folder. Default: PERDURE_DATA_DIR, then a folder in your home folder.",
        rich_help_panel=_PANEL,
    ),
]

Owner = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only memories of this agent; '' for those without an owner.")
]
Type = Annotated[str | None, typer.Option("--type", metavar="TYPE", help="Only memories of this type.")]
Subject = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Only memories about this subject, such as user:42; '' for the agents' own."),
]
Tags = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", help="Only memories with this tag. Repeatable.")
]


def without_embedder(settings: Settings) -> Settings:
    """Return the settings for a command that embeds nothing, so that a different embedder is no conflict."""
    return settings.model_copy(update={"embedder": ""})


def with_store_options(command: Callable[Concatenate[Settings, P], None]) -> Callable[..., None]:
    """Add the memory store options to a command, which receives the settings as its first argument."""
    return with_options(command, {"memory": StorePlace, "data_dir": DataDir}, store_settings)


def store_settings(*, memory: str | None, **given: object) -> Settings:
    """Return the settings with the store of --memory."""
    warn_of_password("--memory", memory, "PERDURE_MEMORY")
    return load_settings(memory=memory, **given)


def with_memory_store(
    *, create: bool = False, embeds: bool = True, reembedding: bool = False
) -> Callable[[Callable[Concatenate[HybridStore, P], Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Add the memory store options to an async command, and run it with the open store as its first argument.

    Args:
        create: Create the store if it does not exist.
        embeds: Whether the command needs the embedder, if one is set.
        reembedding: Open the store even if its vectors are from another embedder.
    """

    def decorate(command: Callable[Concatenate[HybridStore, P], Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(settings: Settings, /, *args: P.args, **kwargs: P.kwargs) -> None:
            async def open_and_run() -> None:
                store = make_store(settings if embeds else without_embedder(settings))
                await (store.open_for_reembedding() if reembedding else store.open(create=create))
                try:
                    await command(store, *args, **kwargs)
                finally:
                    await store.close()

            anyio.run(open_and_run)

        return with_store_options(called)

    return decorate
