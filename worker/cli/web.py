"""`perdure web`: the HTTP API of a deployment, and the tokens of its users."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from ...queues.errors import ConfigurationError
from ...queues.producer import Producer
from ..app import App
from ..log import configure_process_log, logger
from ..settings import load_settings
from ..web.extra import check_packages
from .support.app_loader import load_app
from .support.connection import ConnectionOptions
from .support.errors import Failed, Misuse
from .support.options import read_tenant
from .support.runner import Output, command

if TYPE_CHECKING:
    from ...queues.security.approvers import ApproverKey

app = typer.Typer(no_args_is_help=True)

TokensFile = Annotated[
    Path | None,
    typer.Option(
        "--tokens",
        metavar="FILE",
        envvar="PERDURE_WEB_TOKENS",
        help="File of the tokens; 'perdure web token' writes it. Default: PERDURE_WEB_TOKENS.",
        show_default=False,
    ),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--secret-file",
        metavar="FILE",
        envvar="PERDURE_WEB_SECRET_FILE",
        help="File of the key that signs cookies and answer links; it is made if it does not exist. All processes of a "
        "deployment share it. Default: PERDURE_WEB_SECRET_FILE, then a key of this process: signatures end with it.",
        show_default=False,
    ),
]
ApproverKeys = Annotated[
    Path | None,
    typer.Option(
        "--approver-keys",
        metavar="FILE",
        envvar="PERDURE_WEB_APPROVER_KEYS",
        help="File of the private keys that sign the answers of users, by their names. Default: "
        "PERDURE_WEB_APPROVER_KEYS, then none.",
        show_default=False,
    ),
]
Host = Annotated[str, typer.Option(metavar="HOST", help="Address to listen on, such as 0.0.0.0 in a container.")]
Port = Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Port to listen on. 0: any free port.")]
RootPath = Annotated[
    str, typer.Option("--root-path", metavar="PATH", help="Path under which a proxy serves it, such as /perdure.")
]


@app.callback()
def web() -> None:
    """Serve the HTTP API, and make tokens for its users."""


def check_extra(what: str) -> None:
    """Raise `Failed` if a package of the extra `web` is missing. what: what needs them."""
    try:
        check_packages(what)
    except ConfigurationError as error:
        raise Failed(str(error)) from None


@app.command()
@command
def run(
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
    host: Host = "127.0.0.1",
    port: Port = 8765,
    tokens: TokensFile = None,
    secret_file: SecretFile = None,
    approver_keys: ApproverKeys = None,
    root_path: RootPath = "",
    max_body: Annotated[
        int, typer.Option("--max-body", min=1024, metavar="BYTES", help="Largest body of a request.")
    ] = 4 << 20,
) -> None:
    """Serve the HTTP API until a signal stops it.

    Callers send a token: Authorization: Bearer TOKEN. The document of all
    operations is at /openapi.json.

    Example: perdure web run tasks.py:app --tokens tokens.toml
    """
    check_extra("the HTTP API")
    if tokens is None:
        raise Misuse("--tokens must name a file: perdure web token NAME --role operator --tokens tokens.toml")
    from ..web.router import application as api
    from ..web.service import Service
    from ..web.users import TokenFile, load_secret

    source = open_source(place, application)
    secret = load_secret(secret_file) if secret_file is not None else token_bytes(32)
    keys = read_keys(approver_keys)
    service = Service(source, TokenFile(tokens), secret=secret, max_body=max_body, approver_keys=keys)
    serve("HTTP API", api(service), host, port, root_path)


def read_keys(path: Path | None) -> Mapping[str, ApproverKey]:
    """Return the private keys of users by their names."""
    from ...queues.security.approvers import read_approver_keys

    return {} if path is None else read_approver_keys(path)


def open_source(place: ConnectionOptions, application: str | None) -> App | Producer:
    """Return the app of the command line, or a producer without one, configured but not open. Start the log."""
    if application is None:
        settings = load_settings(**place.overrides())
        configure_process_log(settings.log_level, json=settings.log_json)
        return place.producer()
    loaded = load_app(application)
    loaded.configure(**place.overrides())
    configure_process_log(loaded.settings.log_level, json=loaded.settings.log_json)
    return loaded


def serve(what: str, application: object, host: str, port: int, root_path: str = "") -> None:
    """Serve an ASGI application until SIGINT or SIGTERM, and log its address.

    Raises:
        Failed: The address cannot be used.
    """
    from ..web.server import make_server

    if root_path and not root_path.startswith("/"):
        raise Misuse(f"--root-path must start with /, got {root_path!r}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # before the address is logged
    except OSError as error:
        listener.close()
        raise Failed(
            f"could not listen on {host} port {port}: {error.strerror or error}; choose --host or --port"
        ) from None
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    server = make_server(application, host, port, root_path=root_path.rstrip("/"))
    logger.info("{} at http://{}:{}{}", what, shown, port, root_path.rstrip("/") or "/")
    try:
        anyio.run(
            lambda: server.serve(sockets=[listener]),
            backend_options={"use_uvloop": find_spec("uvloop") is not None},
        )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if not server.started:
        raise Failed(f"{what} could not start: the log says why")


@app.command()
@command
def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the user, for audit lines.")],
    *,
    role: Annotated[
        list[str],
        typer.Option(
            "--role",
            metavar="ROLE",
            help="Role of the user: producer, viewer, operator, approver or admin. Repeat it for several.",
            show_default=False,
        ),
    ],
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant",
            metavar="NAME",
            parser=read_tenant,
            help="Tenant whose tasks and sessions the user sees and makes. Default: those of all tenants.",
        ),
    ] = None,
    tokens: TokensFile = None,
) -> Output:
    """Make a token, print it once, and add its hash to the token file.

    A producer enqueues tasks and follows its own, a viewer reads all, an
    operator also changes tasks, dead letters, queues and limits, an
    approver answers questions, an admin also reveals secret values.

    Example: perdure web token shop --role producer --tokens tokens.toml
    """
    check_extra("the HTTP API")
    from ..web.users import Role, add_token

    if tokens is None:
        raise Misuse("--tokens must name the file that the token is added to, such as tokens.toml")
    if unknown := sorted(set(role) - set(Role)):
        raise Misuse(f"--role must be one of {', '.join(Role)}, got {unknown[0]!r}")
    try:
        made = add_token(tokens, name, [Role(given) for given in role], tenant)
    except ConfigurationError as error:
        raise Failed(str(error)) from None
    said = f"added {name} to {tokens}; the token is shown only now"
    return Output({"name": name, "token": made}, made, notes=[said])
