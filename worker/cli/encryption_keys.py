"""`perdure keys`: generate and list the keys that encrypt data at rest, and those with which approvers sign."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...queues.errors import ConfigurationError
from ...queues.private_files import replaced_file
from ...queues.security.keyring import generate_key
from ..settings import load_settings
from .support.errors import Failed, Misuse
from .support.output import StderrText, note, print_text
from .support.runner import Output, command

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def keys() -> None:
    """Generate keys for encryption and for approvers, and list those in use."""


@app.command()
def generate(
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the key to this new file, which only you can read."),
    ] = None,
    approver: Annotated[
        str | None,
        typer.Option(
            "--approver", metavar="NAME", help="Generate the pair of keys of an approver instead. Needs --output."
        ),
    ] = None,
) -> None:
    """Generate a key: 32 random bytes in base64.

    Name its file in PERDURE_ENCRYPTION_KEY_FILE for workers and producers.

    With --approver: a pair of Ed25519 keys, by which workers know who has
    answered a question. The private key goes into FILE: name it in
    PERDURE_APPROVER_KEY_FILE where NAME answers, and nowhere else. The public
    line goes to stdout: add it to the file of PERDURE_APPROVERS_FILE of all
    workers.

    Example: perdure keys generate -o perdure.keys
    Example: perdure keys generate --approver ada -o ada.key >> approvers
    """
    if approver is not None:
        _generate_approver(approver, output)
        return
    if output is None:
        print_text(generate_key())
        return
    _write(output, generate_key())
    note(f"wrote a new key to {output}; set PERDURE_ENCRYPTION_KEY_FILE to this path")


def _generate_approver(name: str, output: Path | None) -> None:
    """Write the private key of a new pair, and print the public line."""
    from ...queues.security.approvers import ApproverKey

    if output is None:
        raise Misuse(f"--output must name a new file for the private key of {name!r}, such as {name}.key")
    try:
        key = ApproverKey.generate(name)
        public = key.public_line
    except ConfigurationError as error:
        raise Failed(str(error)) from None
    _write(output, key.private_line)
    print_text(public)
    note(
        f"wrote the private key of {name} to {output}; set PERDURE_APPROVER_KEY_FILE where {name} answers. "
        "The line on stdout is public: add it to the PERDURE_APPROVERS_FILE of all workers"
    )


def _write(output: Path, line: str) -> None:
    """Write a line to a new file that only its owner can read."""
    try:
        with replaced_file(output, new=True) as file:
            file.write(f"{line}\n".encode())
    except FileExistsError:
        raise Failed(f"could not create {output}: File exists; give a new file") from None
    except OSError as error:
        raise Failed(f"could not create {output}: {error.strerror or error}; give a new file") from None


@app.command("list")
@command
def list_() -> Output:
    """List the ids of the keys in this environment, and the approvers.

    The first key encrypts; all keys decrypt. Use it to check that all hosts
    have the same keys. Then come the approvers that this environment knows.

    Example: perdure keys list
    """
    settings = load_settings()
    found, answers = settings.encryptor, settings.answer_keys
    nothing = StderrText("no key is set: data is stored unencrypted")
    known = None if answers is None else answers.approvers
    own = None if answers is None or answers.own is None else answers.own.name
    names = sorted(() if known is None else known.keys)
    data = {"keys": list(found.key_ids), "required": found.required, "approvers": names, "signs_as": own}
    approvers = [f"approver {name}" for name in names] + ([] if own is None else [f"signs answers as {own}"])
    return Output(data, *(found.key_ids if found.active else [nothing]), *approvers)
