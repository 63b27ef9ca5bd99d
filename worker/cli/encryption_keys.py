"""`perdure keys`: the keys that data at rest is sealed with; docs/security.md has how they are changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ...queues import generate_key
from ..settings import load_settings
from .support.errors import Failed
from .support.output import AsJson, note, print_data, print_json

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def keys() -> None:
    """Make keys of encryption, and see which are in use."""


@app.command()
def generate(
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A new file that only you can read.", show_default=False),
    ] = None,
) -> None:
    """Print a new key: 32 random bytes, in base64.

    Example: perdure keys generate -o perdure.keys
    """
    if output is None:
        print_data(generate_key())
        return
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise Failed(f"cannot make {output}: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{generate_key()}\n")
    note(f"a new key is in {output}: name it as PERDURE_ENCRYPTION_KEY_FILE")


@app.command("list")
def list_(*, json: AsJson = False) -> None:
    """List the ids of the keys that this environment names; the first one seals, all open.

    Example: perdure keys list
    """
    found = load_settings().encryptor
    if json:
        print_json({"keys": list(found.key_ids), "required": found.required})
    elif found.active:
        print_data("\n".join(found.key_ids))
    else:
        note("no key is set: data is stored as it is")
