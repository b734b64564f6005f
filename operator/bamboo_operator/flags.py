"""The operator's command line options, with their help texts and checks."""

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from bamboo_core.complaints import SilentErrorsNamed, said_by
from bamboo_core.job.fields import ManifestError
from bamboo_core.names import (
    EXIT_USAGE,
    LABEL_ACTIVE,
    WEB_PORT,
    WORKERS_PORT,
)
from bamboo_operator.auth.worker_gateway import ServingCertificate
from bamboo_operator.kube.access import NAMESPACE_FILE, TOKEN_FILE
from bamboo_operator.kube.lease import LeaseName
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from bamboo_operator.process import OperatorOptions
from bamboo_operator.signals.node_marks import NodeMark, read_marks
from bamboo_operator.watch_handlers import KopfRepetitions

LEAST_KEY = 16  # bytes
LEASE = "bamboo-operator"
T = TypeVar("T")


# A mistake in these flags ends the command with an error message.


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFlags:
    """Flags for the operator's addresses and namespaces."""

    listen: Annotated[str, typer.Option(help="Address and port to listen on for workers' control channels.")] = (
        f"0.0.0.0:{WORKERS_PORT}"
    )
    web_listen: Annotated[
        str, typer.Option(help="Address and port to listen on for health, metrics and job pages.")
    ] = f"0.0.0.0:{WEB_PORT}"
    url: Annotated[
        str | None,
        typer.Option(
            help="ws://HOST:PORT, with a certificate wss://HOST:PORT, at which workers' pods reach that port.",
            envvar="BAMBOO_OPERATOR_URL",
        ),
    ] = None
    namespace: Annotated[list[str] | None, typer.Option(help="Watch only these (may be repeated); default: all.")] = (
        None
    )

    def check_url(self, *, encrypted: bool) -> None:
        scheme = "wss" if encrypted else "ws"
        if self.url and not self.url.startswith(f"{scheme}://"):
            raise wrong(f'--url: expected {scheme}://HOST:PORT, got "{self.url}"')


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFlags:
    """Flags for workers' pods."""

    key_file: Annotated[
        Path,
        typer.Option(
            help="File with at least 16 random bytes, the same after a restart: jobs' secrets are derived from it."
        ),
    ]
    image: Annotated[
        str, typer.Option(help="Trainer image of jobs without spec.worker.image.", envvar="BAMBOO_TRAINER_IMAGE")
    ] = "bamboo-trainer"
    run_as_user: Annotated[int, typer.Option(help="User id of workers; -1 leaves it to the image.")] = 65532
    node_marks: Annotated[
        Path | None,
        typer.Option(help="YAML file with your own marks of nodes that will be taken away (docs/install.md)."),
    ] = None
    network_policy: Annotated[
        bool, typer.Option(help="Make a NetworkPolicy for each job: only its own workers may connect to its workers.")
    ] = True
    disruption_budgets: Annotated[
        bool,
        typer.Option(help="Make a PodDisruptionBudget for each job that trains: workers are evicted one at a time."),
    ] = True

    def settings(self, authority: str) -> WorkerPodSettings:
        return WorkerPodSettings(
            coordinator_url="",
            image=self.image,
            run_as_user=None if self.run_as_user < 0 else self.run_as_user,
            network_policy=self.network_policy,
            disruption_budgets=self.disruption_budgets,
            authority=authority,
        )

    def marks(self) -> tuple[NodeMark, ...]:
        try:
            return read_marks(self.node_marks) if self.node_marks else ()
        except ManifestError as error:
            raise wrong("; ".join(f"--node-marks: {problem}" for problem in error.problems)) from None

    def key(self) -> bytes:
        key = _read("--key-file", self.key_file.read_bytes)
        if len(key) < LEAST_KEY:
            raise wrong(f"--key-file: expected at least {LEAST_KEY} bytes in {self.key_file}, got {len(key)}")
        return key


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFlags:
    """Flags for the serving certificate."""

    tls_cert: Annotated[
        Path | None,
        typer.Option(help="PEM file with the serving certificate for workers; --url then begins with wss://."),
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with the certificate's key.")] = None
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM file with the authority that signed it, which workers trust.")
    ] = None

    def certificate(self) -> ServingCertificate | None:
        """Return the certificate; None (no encryption) without the flags. Raises typer.Exit for a bad flag or file."""
        chain, key, authority = self.tls_cert, self.tls_key, self.tls_ca
        if chain is None and key is None and authority is None:
            return None
        if chain is None or key is None or authority is None:
            raise wrong("--tls-cert, --tls-key and --tls-ca: expected all three or none")
        certificate = ServingCertificate(chain=chain, key=key, authority=authority)
        _read("--tls-cert, --tls-key", certificate.context)
        return certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFlags:
    """Flags for the Lease that lets only one operator work at a time."""

    lease: Annotated[
        str | None,
        typer.Option(
            help="NAMESPACE/NAME of the Lease that this operator has to hold to work, so that no other one does;"
            f" default: {LEASE} in its pod's namespace, without a pod none."
        ),
    ] = None
    identity: Annotated[
        str | None,
        typer.Option(help="The holder's name in that Lease; default: the pod's name, without a pod the host's."),
    ] = None
    label_active: Annotated[
        bool,
        typer.Option(
            "--label-active",
            help=f"One of several replicas: label its pod {LABEL_ACTIVE}=true while it works, so that the Service finds"
            " it, and be ready while it waits for the Lease.",
        ),
    ] = False

    def name(self) -> LeaseName | None:
        """Return the name of the Lease; None without --lease outside a pod, where the operator works without a Lease.
        Raises typer.Exit after an error message.
        """
        lease = self._named()
        if self.label_active and lease is None:
            raise wrong("--label-active: expected --lease as well; without it all replicas would work")
        return lease

    def _named(self) -> LeaseName | None:
        if self.lease is None:
            inside = TOKEN_FILE.exists() and NAMESPACE_FILE.exists()
            return LeaseName(_read("--lease", NAMESPACE_FILE.read_text).strip(), LEASE) if inside else None
        try:
            return LeaseName.parse(self.lease)
        except ValueError as error:
            raise wrong(f"--lease: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFlags:
    """Flags for the log on standard error."""

    verbose: Annotated[bool, typer.Option("--verbose", help="Log at level DEBUG, too.")] = False

    def set_up(self) -> None:
        handler = logging.StreamHandler()
        handler.addFilter(SilentErrorsNamed())
        handler.addFilter(KopfRepetitions())
        logging.basicConfig(
            handlers=[handler],
            level=logging.DEBUG if self.verbose else logging.INFO,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        logging.getLogger("kopf").setLevel(logging.INFO if self.verbose else logging.WARNING)


def operator_options(ports: PortFlags, workers: WorkerFlags, tls: TlsFlags, lease: LeaseFlags) -> OperatorOptions:
    """Build the operator's options from the flags, and read the files that they name. Raises typer.Exit after an error
    message if a flag or file is wrong.
    """
    listen, web_listen = _address("--listen", ports.listen), _address("--web-listen", ports.web_listen)
    certificate = tls.certificate()
    ports.check_url(encrypted=certificate is not None)
    authority = _read("--tls-ca", certificate.trusted) if certificate else ""
    return OperatorOptions(
        listen=listen,
        web_listen=web_listen,
        url=ports.url,
        namespaces=list(ports.namespace or ()),
        certificate=certificate,
        lease=lease.name(),
        identity=lease.identity or socket.gethostname(),
        label_active=lease.label_active,
        workers=workers.settings(authority),
        key=workers.key(),
        marks=workers.marks(),
    )


def _address(option: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise wrong(f'{option}: expected ADDRESS:PORT, got "{text}"')
    return host, int(port)


def _read(option: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (OSError, ValueError) as error:
        raise wrong(f"{option}: {said_by(error)}") from None


def wrong(message: str) -> typer.Exit:
    typer.echo(f"bamboo-operator: {message}", err=True)
    return typer.Exit(EXIT_USAGE)
