"""A certificate for the operator, as files, and a TLS context that trusts it."""

import ssl
from pathlib import Path

import trustme


def issue(folder: Path) -> list[str]:
    """Write a new CA and its certificate for 127.0.0.1, with the key, to `folder`; return the operator's TLS flags."""
    authority = trustme.CA()
    mine = authority.issue_cert("127.0.0.1")
    mine.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    mine.private_key_pem.write_to_path(folder / "tls.key")
    authority.cert_pem.write_to_path(folder / "ca.crt")
    files = {"--tls-cert": "tls.crt", "--tls-key": "tls.key", "--tls-ca": "ca.crt"}
    return [part for flag, name in files.items() for part in (flag, str(folder / name))]


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "ca.crt"))
