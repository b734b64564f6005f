"""`python -m bamboo_operator`: the operator, as its Deployment runs it."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import kopf
import typer

from bamboo.job.fields import ManifestError
from bamboo.kube.errors import RemoteError
from bamboo.names import EXIT_FAILED, EXIT_USAGE, LABEL_ACTIVE, METADATA_CHOICES, WEB_PORT, WORKERS_PORT
from bamboo_operator.auth.serving_certificate import ServingCertificate
from bamboo_operator.cluster.node_marks import NodeMark, read_marks
from bamboo_operator.kube.credentials import NAMESPACE_FILE, TOKEN_FILE
from bamboo_operator.kube.lease import LeaseLost, LeaseName
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from bamboo_operator.process import OperatorOptions, run_operator

LEAST_KEY = 16  # bytes
LEASE = "bamboo-operator"
T = TypeVar("T")


def command(
    listen: Annotated[
        str, typer.Option(help="Address and port to listen on for workers' control channels.")
    ] = f"0.0.0.0:{WORKERS_PORT}",
    web_listen: Annotated[
        str, typer.Option(help="Address and port to listen on for health, metrics and job pages.")
    ] = f"0.0.0.0:{WEB_PORT}",
    url: Annotated[
        str | None,
        typer.Option(
            help="ws://HOST:PORT, with a certificate wss://HOST:PORT, at which workers' pods reach that port.",
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
            help="File with at least 16 random bytes, the same after a restart: jobs' secrets are derived from it."
        ),
    ],
    image: Annotated[
        str, typer.Option(help="Trainer image of jobs without spec.worker.image.", envvar="BAMBOO_TRAINER_IMAGE")
    ] = "bamboo-trainer",
    run_as_user: Annotated[int, typer.Option(help="User id of workers; -1 leaves it to the image.")] = 65532,
    metadata: Annotated[
        str, typer.Option(help=f"Cloud whose metadata endpoint workers watch: {', '.join(METADATA_CHOICES)}.")
    ] = "off",
    node_marks: Annotated[
        Path | None,
        typer.Option(help="YAML file with your own marks on nodes that will be taken away (docs/install.md)."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file with the certificate that workers are shown; then --url is wss://.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with the certificate's key.")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM file with the authority that signed it, which workers trust.")
    ] = None,
    network_policy: Annotated[
        bool,
        typer.Option(help="Make a NetworkPolicy for each job: only its own workers may connect to its workers."),
    ] = True,
    disruption_budgets: Annotated[
        bool,
        typer.Option(help="Make a PodDisruptionBudget for each job that trains: workers are evicted one at a time."),
    ] = True,
    lease: Annotated[
        str | None,
        typer.Option(
            help="NAMESPACE/NAME of the Lease that this operator has to hold to work, so that no other one does;"
            f" default: {LEASE} in its pod's namespace, without a pod none."
        ),
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option(help="The holder's name in that Lease; default: the pod's name, without a pod the host's."),
    ] = None,
    label_active: Annotated[
        bool,
        typer.Option(
            "--label-active",
            help=f"One of several replicas: label its pod {LABEL_ACTIVE}=true while it works, so that the Service finds"
            " it, and be ready while it waits for the Lease.",
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log at level DEBUG, too.")] = False,
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
    workers = WorkerPodSettings(
        coordinator_url="", image=image, run_as_user=user, metadata=metadata, network_policy=network_policy,
        disruption_budgets=disruption_budgets,
        authority=_read("--tls-ca", certificate.trusted) if certificate else "",
    )  # fmt: skip
    if url and not url.startswith("wss://" if certificate else "ws://"):
        raise _wrong(f'--url: expected {"wss" if certificate else "ws"}://HOST:PORT, got "{url}"')
    if label_active and _lease(lease) is None:
        raise _wrong("--label-active: expected --lease with it, for without one all replicas would work")
    options = OperatorOptions(
        **addresses, url=url, key=_key(key_file), workers=workers, namespaces=list(namespace or ()),
        certificate=certificate, lease=_lease(lease), identity=identity or socket.gethostname(),
        marks=_marks(node_marks), label_active=label_active,
    )  # fmt: skip
    try:
        asyncio.run(_until_signal(options))
    except (RemoteError, kopf.LoginError, LeaseLost, OSError) as error:
        typer.echo(f"bamboo-operator: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None


async def _until_signal(options: OperatorOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    await run_operator(options, stop)


def _address(option: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise _wrong(f'{option}: expected ADDRESS:PORT, got "{text}"')
    return host, int(port)


def _marks(path: Path | None) -> tuple[NodeMark, ...]:
    try:
        return read_marks(path) if path else ()
    except ManifestError as error:
        raise _wrong("; ".join(f"--node-marks: {problem}" for problem in error.problems)) from None


def _lease(text: str | None) -> LeaseName | None:
    """None if there can be no other operator: outside a pod, unless it is said."""
    if text is None:
        inside = TOKEN_FILE.exists() and NAMESPACE_FILE.exists()
        return LeaseName(_read("--lease", NAMESPACE_FILE.read_text).strip(), LEASE) if inside else None
    try:
        return LeaseName.parse(text)
    except ValueError as error:
        raise _wrong(f"--lease: {error}") from None


def _certificate(chain: Path | None, key: Path | None, authority: Path | None) -> ServingCertificate | None:
    """None if none is wanted; then the traffic with workers is not encrypted."""
    if chain is None and key is None and authority is None:
        return None
    if chain is None or key is None or authority is None:
        raise _wrong("--tls-cert, --tls-key and --tls-ca: expected all three or none")
    certificate = ServingCertificate(chain=chain, key=key, authority=authority)
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
