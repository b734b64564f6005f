"""The cluster's certificates and ServiceAccount keys, made with the openssl command."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

DAYS = "30"
SERVER_NAMES = (
    "IP:127.0.0.1,IP:10.96.0.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,"
    "DNS:kubernetes.default.svc.cluster.local"
)


@dataclass(frozen=True, slots=True)
class Pair:
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Pki:
    authority: Pair
    server: Pair
    front_proxy_authority: Pair
    front_proxy: Pair
    service_account_key: Path
    service_account_public: Path
    clients: dict[str, Pair]


def create(folder: Path, clients: dict[str, str], address: str) -> Pki:
    """Make all certificates and keys in the new folder `folder`. clients: subject by name, such as {"admin":
    "/O=system:masters/CN=admin"}. address: the API server's IP address.
    """
    folder.mkdir(mode=0o700)
    config = folder / "openssl.cnf"
    config.write_text("[req]\ndistinguished_name=subject\n[subject]\n")
    authority = _authority(folder, "ca")
    front_proxy_authority = _authority(folder, "front-proxy-ca")
    names = f"subjectAltName={SERVER_NAMES},IP:{address}"
    key, public = folder / "service-account.key", folder / "service-account.pub"
    _openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", str(key))
    _openssl("pkey", "-in", str(key), "-pubout", "-out", str(public))
    return Pki(
        authority=authority,
        server=_leaf(folder, "apiserver", "/CN=kube-apiserver", authority, "extendedKeyUsage=serverAuth", names),
        front_proxy_authority=front_proxy_authority,
        front_proxy=_leaf(folder, "front-proxy", "/CN=front-proxy", front_proxy_authority),
        service_account_key=key,
        service_account_public=public,
        clients={name: _leaf(folder, name, subject, authority) for name, subject in clients.items()},
    )


def client(made: Pki, name: str, subject: str) -> Pair:
    """Make the certificate and key of one more client. subject: such as "/O=system:nodes/CN=system:node:a"."""
    return _leaf(made.authority.certificate.parent, name, subject, made.authority)


def _authority(folder: Path, name: str) -> Pair:
    return _certificate(folder, name, f"/CN={name}", "basicConstraints=critical,CA:TRUE")


def _leaf(folder: Path, name: str, subject: str, authority: Pair, *extensions: str) -> Pair:
    signer = ("-CA", str(authority.certificate), "-CAkey", str(authority.key))
    return _certificate(folder, name, subject, *(extensions or ("extendedKeyUsage=clientAuth",)), signer=signer)


def _certificate(folder: Path, name: str, subject: str, *extensions: str, signer: tuple[str, ...] = ()) -> Pair:
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    _openssl(
        "req",
        "-x509",
        "-config",
        str(folder / "openssl.cnf"),
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        DAYS,
        "-subj",
        subject,
        "-keyout",
        str(pair.key),
        "-out",
        str(pair.certificate),
        *signer,
        *(text for e in extensions for text in ("-addext", e)),
    )
    return pair


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"openssl {arguments[0]} failed: {done.stderr.strip()}")
