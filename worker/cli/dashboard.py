"""`perdure dashboard`: pages of a deployment in a browser."""

from __future__ import annotations

import getpass
from secrets import token_bytes
from typing import Annotated

import typer

from .support.connection import ConnectionOptions
from .support.errors import Misuse
from .support.runner import command
from .web import (
    ApproverKeys,
    Host,
    Port,
    RootPath,
    SecretFile,
    TokensFile,
    check_extra,
    open_source,
    read_keys,
    serve,
)


@command
def dashboard(
    place: ConnectionOptions,
    application: Annotated[
        str | None,
        typer.Argument(
            metavar="[APP]",
            help="The app: module:attribute or path/to/file.py:attribute. Without it, tasks are known by the catalog "
            "that workers publish.",
            show_default=False,
        ),
    ] = None,
    *,
    actions: Annotated[
        bool, typer.Option("--actions", help="Let users change tasks, queues and more. Default: all is read only.")
    ] = False,
    host: Host = "127.0.0.1",
    port: Port = 8766,
    tokens: TokensFile = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Name by which browsers may reach it, such as perdure.example.com. Repeat it for several. Names of "
            "this machine and addresses are allowed.",
            show_default=False,
        ),
    ] = None,
    secret_file: SecretFile = None,
    approver_keys: ApproverKeys = None,
    root_path: RootPath = "",
) -> None:
    """Serve the dashboard until a signal stops it.

    It shows queues, workers and tasks, and why each task is where it is.
    It changes nothing unless it is started with --actions. Each action
    shows what will happen, asks, and leaves a line in the log with the user.

    On this machine it needs no sign-in: everyone who can reach the port
    uses it as the user that started it. With --tokens, users sign in with a token
    of 'perdure web token'; another --host than this machine needs that.

    Example: perdure dashboard --actions
    """
    check_extra("the dashboard")
    from ..dashboard.application import application as make
    from ..web.server import is_loopback
    from ..web.service import Service
    from ..web.users import Role, TokenFile, User, load_secret

    if tokens is None and not is_loopback(host):
        raise Misuse(
            f"--tokens must name a file, since other machines reach {host}: "
            "perdure web token NAME --role viewer --tokens tokens.toml"
        )
    known = TokenFile(tokens) if tokens is not None else None
    secret = load_secret(secret_file) if secret_file is not None else token_bytes(32)
    source = open_source(place, application)
    user = User(user_name(), [Role.ADMIN if actions else Role.VIEWER])
    service = Service(
        source, known, None if known is not None else lambda _: user, secret, approver_keys=read_keys(approver_keys)
    )
    hosts = frozenset(name.lower().rstrip(".") for name in allow_host or ())
    serve("dashboard", make(service, actions=actions, hosts=hosts), host, port, root_path)


def user_name() -> str:
    """Return the name of the user of this process, for audit lines."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry of this number, as in some containers
        return "local"
