"""`python -m bamboo_operator`: the operator, as its Deployment runs it."""

import asyncio
import contextlib
import logging
import secrets
import signal
from pathlib import Path
from typing import Annotated

import kopf
import typer

from bamboo.names import EXIT_FAILED, EXIT_USAGE, METADATA_CHOICES
from bamboo_operator.api import Api, credentials
from bamboo_operator.cluster import Cluster
from bamboo_operator.doors import Doors
from bamboo_operator.lifecycle import Tools
from bamboo_operator.pods import OperatorSettings
from bamboo_operator.watch import Lives, registry, settings

logger = logging.getLogger(__name__)

LEAST_KEY = 16  # bytes


async def operate(
    *,
    host: str,
    port: int,
    url: str | None,
    key: bytes,
    workers: OperatorSettings,
    namespaces: list[str],
    stop: asyncio.Event,
) -> None:
    """Until stop is set. url: under which workers reach this process; by default its own address."""
    chosen = settings()
    info = credentials(chosen)
    api, cluster = Api(info), Cluster()
    lives: list[Lives] = []
    doors = Doors(lambda: lives[0].stuck() if lives else None)
    try:
        bound = await doors.start(host, port)
        tools = Tools(
            cluster=cluster, doors=doors, api=api, key=key, url=url or f"ws://{host}:{bound}", settings=workers
        )
        lives.append(Lives(tools))
        handlers = registry(lives[0], tools)

        @kopf.on.login(id="login", registry=handlers)
        async def login(**_: object) -> kopf.ConnectionInfo:
            return credentials(chosen)

        logger.info("listening on %s:%d; workers come to %s", host, bound, tools.url)
        await kopf.operator(
            registry=handlers,
            settings=chosen,
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=stop,
        )
    finally:
        for one in lives:
            await one.stop()
        await doors.stop()
        await api.close()


def command(
    listen: Annotated[
        str, typer.Option(help="Address and port on which workers' control channels come in.")
    ] = "0.0.0.0:8765",  # noqa: S104
    url: Annotated[
        str | None,
        typer.Option(help="ws://HOST:PORT under which workers' pods reach that port.", envvar="BAMBOO_OPERATOR_URL"),
    ] = None,
    namespace: Annotated[
        list[str] | None, typer.Option(help="Watch only these (may be repeated); default: all.")
    ] = None,
    image: Annotated[
        str, typer.Option(help="Trainer image of jobs that name none.", envvar="BAMBOO_TRAINER_IMAGE")
    ] = "bamboo-trainer",
    run_as_user: Annotated[int, typer.Option(help="User id of workers; -1 leaves it to the image.")] = 65532,
    metadata: Annotated[
        str, typer.Option(help=f"Cloud whose metadata endpoint workers watch: {', '.join(METADATA_CHOICES)}.")
    ] = "off",
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with at least 16 random bytes, the same after a restart: jobs' secrets are made from it."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also say what is only of interest to developers.")
    ] = False,
) -> None:
    """Bamboo's Kubernetes operator: runs BambooJobs on the nodes of the cluster that it is in (or KUBECONFIG's)."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("kopf").setLevel(logging.INFO if verbose else logging.WARNING)
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise _wrong(f'--listen: expected ADDRESS:PORT, got "{listen}"')
    if metadata not in METADATA_CHOICES:
        raise _wrong(f'--metadata: expected one of {", ".join(METADATA_CHOICES)}, got "{metadata}"')
    user = None if run_as_user < 0 else run_as_user
    workers = OperatorSettings(coordinator_url="", image=image, run_as_user=user, metadata=metadata)
    arguments = {"host": host, "port": int(port), "url": url, "key": _key(key_file), "workers": workers}
    try:
        asyncio.run(_until_signal(namespaces=list(namespace or ()), **arguments))
    except kopf.LoginError as error:
        typer.echo(f"bamboo-operator: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None


async def _until_signal(**arguments: object) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    await operate(stop=stop, **arguments)  # type: ignore[arg-type]


def _key(path: Path | None) -> bytes:
    if path is None:
        logger.warning("no --key-file: workers that join after a restart of the operator can't talk to older ones")
        return secrets.token_bytes(32)
    try:
        key = path.read_bytes()
    except OSError as error:
        raise _wrong(f"--key-file: {error}") from None
    if len(key) < LEAST_KEY:
        raise _wrong(f"--key-file: expected at least {LEAST_KEY} bytes in {path}, got {len(key)}")
    return key


def _wrong(message: str) -> typer.Exit:
    typer.echo(f"bamboo-operator: {message}", err=True)
    return typer.Exit(EXIT_USAGE)


def main() -> None:
    typer.run(command)


if __name__ == "__main__":
    main()
