"""Which API server the operator works with, and as whom: its ServiceAccount in a cluster, else a kubeconfig."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import kopf

from bamboo_core.kube.kubeconfig import ACCOUNT, Access, in_cluster, load

TOKEN_FILE, AUTHORITY_FILE, NAMESPACE_FILE = ACCOUNT / "token", ACCOUNT / "ca.crt", ACCOUNT / "namespace"
USUAL = {"KUBERNETES_SERVICE_HOST": "kubernetes.default.svc", "KUBERNETES_SERVICE_PORT": "443"}


def operator_access(environment: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> Access:
    """The pod's ServiceAccount in a cluster, else KUBECONFIG. Raises ConfigError if there is neither.

    In a pod the server is the one that the kubelet names: it is reached also while the cluster's DNS is away.
    """
    return in_cluster({**USUAL, **environment}, account) or load(environment=environment)


def kopf_login(settings: kopf.OperatorSettings, access: Access) -> kopf.ConnectionInfo:
    """kopf's own connection to that server; it reads a pod's token, or the kubeconfig, itself.

    Raises kopf.LoginError if it finds neither.
    """
    inside = kopf.login_with_service_account(settings=settings)
    if inside is not None:
        return replace(inside, server=access.server.url)
    info = kopf.login_with_kubeconfig(settings=settings)
    if info is None:
        raise kopf.LoginError("no cluster: neither a ServiceAccount nor a kubeconfig (KUBECONFIG) is there")
    return info
