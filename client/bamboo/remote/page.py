"""`page`, which opens a job's web page by port forwarding to the operator, with a ServiceAccount's token."""

import asyncio
import contextlib
import html
import tempfile
import webbrowser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bamboo.remote.operator_pods import OPERATOR, is_running, operator_for, operator_pods
from bamboo.remote.session import Session, Target
from bamboo_core.complaints import system_reason
from bamboo_core.kube.api import KubeApi, Object
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_core.kube.port_forward import PortForward
from bamboo_core.names import PAGE_AUDIENCE, TOKEN_SECONDS, WEB_PORT

PORT_NAME = "web"
LIFE = 0.8  # share of a token's life after which it is renewed
WARNING = (
    "the token in this URL is {account}'s: for an hour, whoever has it can look at every job that this account may"
    " get, from this machine and from inside the cluster; Ctrl-C ends the tunnel"
)

READ_SECONDS = 60.0  # for the browser to start and read the file

LEADING = """\
<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>Bamboo</title>
<a href="{url}">The job's page</a>
"""


async def page(
    session: Session, name: Target, *, operator_namespace: str | None, account: str, port: int, open_browser: bool
) -> int:
    """Serve the job's page until interrupted. Print the URL, again whenever its token is renewed.

    operator_namespace: None searches for the operator. account: the ServiceAccount whose token opens the page. port:
    the local port of the tunnel to the operator's web server; 0 for a free one.

    Raises RemoteError if there is no such job, operator or account, or when the tunnel breaks.
    """
    watching, job = session.of(name)
    await session.api.job(watching, job)  # report a wrong name before the tunnel is opened
    pod = await _operator(session.api, operator_namespace, watching)
    namespace = operator_namespace or pod["metadata"]["namespace"]
    tunnel = PortForward(session.api, pod["metadata"]["namespace"], pod["metadata"]["name"], web_port(pod))
    outer = await tunnel.open(port)
    opening: asyncio.Task[None] | None = None
    try:
        while True:
            token, seconds = await _token(session.api, namespace, account)
            url = f"http://127.0.0.1:{outer}/jobs/{watching}/{job}/#token={token}"
            print(url, flush=True)
            session.say(WARNING.format(account=f"{namespace}/{account}"))
            if open_browser and opening is None:
                opening = asyncio.create_task(_open(session, url))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds * LIFE):
                    await tunnel.broken()
                    raise RemoteError("the tunnel to the operator is broken; has it been restarted?")
    finally:
        if opening is not None:
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await opening
        await tunnel.close()


async def _open(session: Session, url: str) -> None:
    try:
        shown = await show(url)
    except OSError as error:
        session.say(f"the browser was not opened: {system_reason(error)}; the URL above can be pasted into it")
        return
    if not shown:
        session.say("no browser was found; the URL above can be pasted into one")


async def _operator(api: KubeApi, namespace: str | None, watching: str) -> Object:
    """Return the running pod of the operator that manages the jobs of the namespace `watching`.

    namespace: the operator's; None searches the whole cluster. If it is unclear which operator manages the jobs, return
    any operator of `namespace`; raises RemoteError if `namespace` is None, or if no operator runs.
    """
    running = [pod for pod in await operator_pods(api, namespace) if is_running(pod)]
    if not running:
        where = f"in namespace {namespace}" if namespace else "in the cluster"
        raise RemoteError(f"no running bamboo-operator was found {where} (label {OPERATOR})")
    found = operator_for(running, watching)
    if found is None and not namespace:
        places = ", ".join(sorted({pod["metadata"]["namespace"] for pod in running}))
        raise RemoteError(
            f"several operators are running (in {places}), and it is not clear which one manages namespace"
            f" {watching}; --operator-namespace names it"
        )
    return dict(found or running[0])


def web_port(pod: Mapping[str, Any]) -> int:
    """Return the number of the pod's container port named "web"; WEB_PORT if there is none."""
    ports = [port for container in pod["spec"]["containers"] for port in container.get("ports") or ()]
    return next((int(port["containerPort"]) for port in ports if port.get("name") == PORT_NAME), WEB_PORT)


async def _token(api: KubeApi, namespace: str, account: str) -> tuple[str, float]:
    """Request a ServiceAccount's token, valid only for job pages; return it and the requested lifetime in seconds."""
    try:
        status = await api.token(namespace, account, PAGE_AUDIENCE, TOKEN_SECONDS)
    except ApiError as error:
        if error.status == 404:
            raise RemoteError(
                f"there is no ServiceAccount {account} in namespace {namespace}; --service-account names another one"
            ) from None
        raise
    return str(status["token"]), float(TOKEN_SECONDS)


# The browser gets the secret URL in a file, since every user of this machine can read a process's arguments.


async def show(url: str, seconds: float = READ_SECONDS) -> bool:
    """Open the URL in a browser through a temporary file, kept for `seconds`; return False if there is no browser."""
    with leading_to(url) as path:
        if not await asyncio.to_thread(webbrowser.open, path.as_uri()):
            return False
        await asyncio.sleep(seconds)
    return True


@contextlib.contextmanager
def leading_to(url: str) -> Iterator[Path]:
    """Provide the path of a temporary HTML page that redirects to the URL and is readable only by this user."""
    with tempfile.NamedTemporaryFile("w", prefix="bamboo-", suffix=".html") as file:  # with mode 0600
        file.write(LEADING.format(url=html.escape(url)))
        file.flush()
        yield Path(file.name)
