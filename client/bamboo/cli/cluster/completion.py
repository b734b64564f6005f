"""What a shell is told when a job's name is being typed: quick, silent and harmless, whatever is wrong."""

import asyncio
from dataclasses import replace

import msgspec

from bamboo import loop_signals
from bamboo_core.kube import kubeconfig
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import RemoteError

SECONDS = 3.0
MOST = 200


def job_names(incomplete: str, namespace: str | None, context: str | None, path: str | None) -> list[str]:
    """The names of jobs that begin so; none if the cluster does not answer at once."""
    try:
        access = without_questions(kubeconfig.load(path, context))
        found = loop_signals.run_until_stopped(lambda: _names(access, namespace or access.namespace))
    except (RemoteError, TimeoutError, asyncio.CancelledError):
        return []
    return sorted(name for name in found if name.startswith(incomplete))[:MOST]


def without_questions(access: kubeconfig.Access) -> kubeconfig.Access:
    """A plugin must not ask anything, as while a command is being typed."""
    plugin = access.user.plugin
    if plugin is None:
        return access
    silent = msgspec.structs.replace(plugin, interactive_mode="Never")
    return replace(access, user=replace(access.user, plugin=silent))


async def _names(access: kubeconfig.Access, namespace: str) -> list[str]:
    async with asyncio.timeout(SECONDS), KubeApi(access) as api:
        return [job["metadata"]["name"] for job in await api.jobs(namespace)]
