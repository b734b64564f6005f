"""`python -m bamboo_operator`: the operator, as its Deployment runs it."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import kopf
import typer
from prometheus_client import CollectorRegistry, ProcessCollector

from bamboo.metrics import Exporter, PageCollector
from bamboo.names import EXIT_FAILED, EXIT_USAGE, METADATA_CHOICES, WEB_PORT, WORKERS_PORT
from bamboo_operator import page
from bamboo_operator.api import Api, credentials
from bamboo_operator.cluster import Cluster
from bamboo_operator.counts import Calls
from bamboo_operator.doors import REVIEWS_AT_ONCE, Doors, Reviews
from bamboo_operator.lifecycle import Tools
from bamboo_operator.metrics import Sources
from bamboo_operator.pods import OperatorSettings
from bamboo_operator.tls import Certificate
from bamboo_operator.watch import Lives, registry, settings
from bamboo_operator.watchers import Watchers
from bamboo_operator.web import Web

logger = logging.getLogger(__name__)

LEAST_KEY = 16  # bytes
T = TypeVar("T")


async def operate(
    *,
    listen: tuple[str, int],
    web_listen: tuple[str, int],
    url: str | None,
    key: bytes,
    workers: OperatorSettings,
    namespaces: list[str],
    certificate: Certificate | None,
    stop: asyncio.Event,
) -> None:
    """Until stop is set. url: under which workers reach this process; by default its own address.

    Raises OSError if an address cannot be had.
    """
    chosen = settings()
    info = credentials(chosen)
    calls, cluster, series = Calls(), Cluster(), CollectorRegistry()
    api, reviewer = Api(info, calls=calls), Api(info, REVIEWS_AT_ONCE, calls)
    visitors = Api(info, page.AT_ONCE, calls)  # NB: of their own, so that they are in nobody's way
    lives: list[Lives] = []
    doors = Doors()
    watchers = Watchers()
    web = Web(lambda: watchers.lost() or (lives[0].stuck() if lives else None), series)
    page.Pages(lambda job: lives[0].look(job) if lives else None, visitors).add_to(web.app)
    tls = certificate.context() if certificate else None
    fresh = asyncio.create_task(certificate.keep_fresh(tls)) if certificate and tls else None
    try:
        bound = await doors.start(*listen, tls)
        await web.start(*web_listen)
        own = f"{'wss' if tls else 'ws'}://{listen[0]}:{bound}"
        tools = Tools(
            cluster=cluster, doors=doors, api=api, reviews=Reviews(reviewer), key=key, url=url or own, settings=workers
        )
        lives.append(Lives(tools))
        sources = Sources(lives=lives[0].living, doors=doors, calls=calls, counts=tools.counts)
        series.register(PageCollector(Exporter.OPERATOR, sources.fill))
        ProcessCollector(registry=series)
        handlers = registry(lives[0], tools)

        @kopf.on.login(id="login", registry=handlers)
        async def login(**_: object) -> kopf.ConnectionInfo:
            return credentials(chosen)

        logger.info("listening on %s:%d; workers come to %s", listen[0], bound, tools.url)
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
        await web.stop()
        await api.close()
        await reviewer.close()
        await visitors.close()
        if fresh:
            fresh.cancel()


def command(
    listen: Annotated[
        str, typer.Option(help="Address and port on which workers' control channels come in.")
    ] = f"0.0.0.0:{WORKERS_PORT}",
    web_listen: Annotated[
        str, typer.Option(help="Address and port of health, metrics and job pages.")
    ] = f"0.0.0.0:{WEB_PORT}",
    url: Annotated[
        str | None,
        typer.Option(
            help="ws://HOST:PORT, with a certificate wss://HOST:PORT, under which workers' pods reach that port.",
            envvar="BAMBOO_OPERATOR_URL",
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None, typer.Option(help="Watch only these (may be repeated); default: all.")
    ] = None,
    *,
    key_file: Annotated[
        Path,
        typer.Option(
            help="File with at least 16 random bytes, the same after a restart: jobs' secrets are made from it."
        ),
    ],
    image: Annotated[
        str, typer.Option(help="Trainer image of jobs that name none.", envvar="BAMBOO_TRAINER_IMAGE")
    ] = "bamboo-trainer",
    run_as_user: Annotated[int, typer.Option(help="User id of workers; -1 leaves it to the image.")] = 65532,
    metadata: Annotated[
        str, typer.Option(help=f"Cloud whose metadata endpoint workers watch: {', '.join(METADATA_CHOICES)}.")
    ] = "off",
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file with the certificate that workers are shown; then --url is wss://.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with the certificate's key.")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM file with the authority that signed it, which workers are told to trust.")
    ] = None,
    network_policy: Annotated[
        bool,
        typer.Option(help="Make a NetworkPolicy for each job: only its own workers may connect to its workers."),
    ] = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also say what is only of interest to developers.")
    ] = False,
) -> None:
    """Bamboo's Kubernetes operator: runs BambooJobs on the nodes of the cluster that it is in (or KUBECONFIG's)."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("kopf").setLevel(logging.INFO if verbose else logging.WARNING)
    addresses = {"listen": _address("--listen", listen), "web_listen": _address("--web-listen", web_listen)}
    if metadata not in METADATA_CHOICES:
        raise _wrong(f'--metadata: expected one of {", ".join(METADATA_CHOICES)}, got "{metadata}"')
    user = None if run_as_user < 0 else run_as_user
    certificate = _certificate(tls_cert, tls_key, tls_ca)
    workers = OperatorSettings(
        coordinator_url="", image=image, run_as_user=user, metadata=metadata, network_policy=network_policy,
        authority=_read("--tls-ca", certificate.trusted) if certificate else "",
    )  # fmt: skip
    if url and not url.startswith("wss://" if certificate else "ws://"):
        raise _wrong(f'--url: expected {"wss" if certificate else "ws"}://HOST:PORT, got "{url}"')
    arguments = {**addresses, "certificate": certificate, "url": url, "key": _key(key_file), "workers": workers}
    try:
        asyncio.run(_until_signal(namespaces=list(namespace or ()), **arguments))
    except (kopf.LoginError, OSError) as error:
        typer.echo(f"bamboo-operator: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None


async def _until_signal(**arguments: object) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    await operate(stop=stop, **arguments)  # type: ignore[arg-type]


def _address(option: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise _wrong(f'{option}: expected ADDRESS:PORT, got "{text}"')
    return host, int(port)


def _certificate(chain: Path | None, key: Path | None, authority: Path | None) -> Certificate | None:
    """None if none is wanted; then what workers say and hear can be read on its way."""
    if chain is None and key is None and authority is None:
        return None
    if chain is None or key is None or authority is None:
        raise _wrong("--tls-cert, --tls-key and --tls-ca: expected all three or none")
    certificate = Certificate(chain=chain, key=key, authority=authority)
    _read("--tls-cert, --tls-key", certificate.context)
    return certificate


def _read(option: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except OSError as error:
        raise _wrong(f"{option}: {error}") from None


def _key(path: Path) -> bytes:
    key = _read("--key-file", path.read_bytes)
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
