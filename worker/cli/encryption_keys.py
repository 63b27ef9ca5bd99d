"""`perdure keys`: generate and list the keys that encrypt data at rest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...queues.private_files import replaced_file
from ...queues.security.keyring import generate_key
from ..settings import load_settings
from .support.errors import Failed
from .support.output import StderrText, note, print_text
from .support.runner import Output, command

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def keys() -> None:
    """Generate encryption keys, and list those in use."""


@app.command()
def generate(
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the key to this new file, which only you can read."),
    ] = None,
) -> None:
    """Generate a key: 32 random bytes in base64.

    Name its file in PERDURE_ENCRYPTION_KEY_FILE for workers and producers.

    Example: perdure keys generate -o perdure.keys
    """
    if output is None:
        print_text(generate_key())
        return
    try:
        with replaced_file(output, new=True) as file:
            file.write(f"{generate_key()}\n".encode())
    except FileExistsError:
        raise Failed(f"could not create {output}: File exists; give a new file") from None
    except OSError as error:
        raise Failed(f"could not create {output}: {error.strerror or error}; give a new file") from None
    note(f"wrote a new key to {output}; set PERDURE_ENCRYPTION_KEY_FILE to this path")


@app.command("list")
@command
def list_() -> Output:
    """List the ids of the keys in this environment.

    The first key encrypts; all keys decrypt. Use it to check that all hosts
    have the same keys.

    Example: perdure keys list
    """
    found = load_settings().encryptor
    nothing = StderrText("no key is set: data is stored unencrypted")
    data = {"keys": list(found.key_ids), "required": found.required}
    return Output(data, *(found.key_ids if found.active else [nothing]))
