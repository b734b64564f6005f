"""What would the official Kubernetes client cost and do in place of our own way to the API server?

    pip install --target /tmp/client kubernetes==37.0.2
    python bench/kubernetes_client.py /tmp/client

Its asyncio side: what its import takes, what a request takes (a pod of 3.5 kB is made at a server on this machine),
what it makes of kubeconfig files that kubectl takes, and how it keeps a Lease. Ours stands beside it.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
import yaml
from aiohttp import web

from _common import main, show
from bamboo_core.kube import kubeconfig
from bamboo_core.kube.connection import Connection, ConnectionOptions
from bamboo_core.kube.credentials import Credentials
from bamboo_core.kube.errors import RemoteError

SPEAKS = "client.authentication.k8s.io/v1"
CREDENTIAL = json.dumps({"apiVersion": SPEAKS, "kind": "ExecCredential", "status": {"token": "of-plugin"}})
IMPORT_COST = """
import pathlib, time; began = time.process_time(); import {0}
took = time.process_time() - began
pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
print(round(took, 2), pages * 4096 >> 20)
"""
REQUESTS = 1000
LEASE_SECONDS, HANGS_SECONDS = 5, 20


def run(
    client: Annotated[Path, typer.Argument(exists=True, help="The folder in which the client is installed.")],
) -> None:
    """Tables of both."""
    sys.path.append(str(client))
    logging.disable()  # the client logs errors that it goes on after
    names = ("aiohttp", "bamboo_core.kube.api", "kubernetes.aio.client")
    rows = [[name, *_import_cost(name, client)] for name in names]
    show("what an import takes", ("module", "CPU s", "RSS, MiB"), rows)
    main(_run())


def _import_cost(module: str, client: Path) -> list[str]:
    code = f"import sys; sys.path.append({str(client)!r})" + IMPORT_COST.format(module)
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    return runs[-1].stdout.split()  # the files are in memory by then


async def _run() -> None:
    costs = [[name, f"{1e6 * seconds:.0f}"] async for name, seconds in _request_costs()]
    show("a request, CPU time of client and server", ("", "µs"), costs)
    with tempfile.TemporaryDirectory() as folder:
        cases = [[name, await _ours(path), await _theirs(path)] for name, path in _cases(Path(folder))]
    show("kubeconfig files", ("file", "ours", "the official client"), cases)
    show("its leader election", ("case", ""), [[name, found] async for name, found in _elections()])


# Requests


@asynccontextmanager
async def _server(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _request_costs() -> AsyncIterator[tuple[str, float]]:
    from kubernetes.aio import client

    env = [{"name": f"NAME_{index}", "value": "v" * 100} for index in range(25)]
    spec = {"containers": [{"name": "worker", "image": "image", "env": env}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "job-w0", "namespace": "team"}, "spec": spec}

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(pod)

    async with _server(answer) as url:
        access = kubeconfig.Access(
            context="bench", server=kubeconfig.ClusterServer(url=url), user=kubeconfig.User(token="t")
        )
        options = ConnectionOptions(agent="bench", total_seconds=10.0, connect_seconds=3.0, connections=1)
        ours = Connection(access, options)
        yield "ours", await _each(lambda: ours.call("POST", "/api/v1/namespaces/team/pods", pod))
        await ours.close()
        for trust_env in (False, True):
            chosen = client.Configuration(host=url)
            chosen.client_session_kwargs = {"trust_env": trust_env}
            async with client.ApiClient(chosen) as api:
                core = client.CoreV1Api(api)
                named = "as it is by itself" if trust_env else "without the environment's proxies and .netrc"
                yield f"its typed API, {named}", await _each(partial(core.create_namespaced_pod, "team", pod))
                yield f"its generic calls, {named}", await _each(partial(_generic, api, pod))


async def _generic(api: Any, pod: Any) -> Any:
    asked = await api.param_serialize("POST", "/api/v1/namespaces/team/pods", body=pod, auth_settings=["BearerToken"])
    answer = await api.call_api(*asked, _request_timeout=aiohttp.ClientTimeout(total=10.0))
    return json.loads(await answer.read())


async def _each(act: Callable[[], Awaitable[Any]]) -> float:
    await act()
    began = time.process_time()
    for _ in range(REQUESTS):
        await act()
    return (time.process_time() - began) / REQUESTS


# Kubeconfig files


def _cases(folder: Path) -> Iterable[tuple[str, str]]:
    """What is special, and KUBECONFIG."""

    def file(name: str, user: Any, **others: Any) -> str:
        entry = {"cluster": name, "user": name}
        document = {
            "current-context": name,
            "contexts": [{"name": name, "context": entry}],
            "clusters": [{"name": name, "cluster": {"server": f"https://{name}"}}],
            "users": [{"name": name, "user": user}],
        }
        (folder / name).write_text(yaml.safe_dump(document | others))
        return str(folder / name)

    def plugin(name: str, script: str) -> dict[str, str]:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
        return {"command": str(folder / name), "apiVersion": SPEAKS}

    gives = f"echo '{CREDENTIAL}'"
    yield "two files, each with a current context", os.pathsep.join([file("one", {}), file("two", {})])
    yield "a token beside a plugin", file("both", {"token": "given", "exec": plugin("gives", gives)})
    yield "a plugin that fails", file("fails", {"exec": plugin("bad", "exit 3")})
    yield "a plugin that is not installed", file("gone", {"exec": {"command": "no-such", "apiVersion": SPEAKS}})
    yield "a plugin that prompts", file("prompts", {"exec": plugin("asks", f"echo open this page >&2; {gives}")})
    yield "as: reader", file("acts", {"token": "given", "as": "reader"})
    (folder / "token").write_text("of-file\n")
    yield "a tokenFile", file("rotates", {"tokenFile": "token"})
    yield "no such context", file("none", {}, **{"current-context": "nowhere"})


async def _ours(files: str) -> str:
    async def headers() -> tuple[str, dict[str, str]]:
        access = kubeconfig.load(None, None, {"KUBECONFIG": files})
        credentials = Credentials(access)
        await credentials.renew()
        return access.server.url, dict(credentials.headers())

    return await _sent(headers)


async def _theirs(files: str) -> str:
    from kubernetes.aio import client, config

    async def headers() -> tuple[str, dict[str, str]]:
        chosen = client.Configuration()
        await config.load_kube_config(files, client_configuration=chosen)
        async with client.ApiClient(chosen) as api:
            _, url, headers, *_ = await api.param_serialize("GET", "", auth_settings=["BearerToken"])
        return url, headers

    return await _sent(headers)


async def _sent(headers: Callable[[], Awaitable[tuple[str, dict[str, str]]]]) -> str:
    """Where it would go, as whom, and what the user was shown; or the error."""
    with tempfile.TemporaryFile() as shown:
        terminal = os.dup(2)
        os.dup2(shown.fileno(), 2)
        try:
            url, sent = await headers()
        except RemoteError as error:
            return f"error: {error}"
        except Exception as error:  # whatever the client lets out is what is shown here
            return f"{type(error).__name__}: {error}"
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
        shown.seek(0)
        seen = shown.read().decode().strip()
    who = {key.title(): value for key, value in sent.items() if key.lower() not in ("user-agent", "accept")}
    return f"{url} {who or 'nobody'}" + (f", user sees: {seen}" if seen else "")


# Leases


async def _elections() -> AsyncIterator[tuple[str, str]]:
    from kubernetes.aio import client
    from kubernetes.aio.leaderelection.electionconfig import Config
    from kubernetes.aio.leaderelection.leaderelection import LeaderElection
    from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

    lease: dict[str, Any] = {}
    leads, hangs = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if hangs.is_set():
            await asyncio.sleep(2 * HANGS_SECONDS)
        if request.method != "GET":
            lease.update(await request.json())
        return web.json_response(lease or {"code": 404}, status=200 if lease else 404)

    async def work() -> None:
        leads.set()
        await asyncio.Event().wait()

    async def over() -> None:
        leads.clear()

    async def elected(url: str) -> str:
        async with client.ApiClient(client.Configuration(host=url)) as api:
            lock = LeaseLock("lease", "team", "me", api)
            running = asyncio.create_task(LeaderElection(Config(lock, LEASE_SECONDS, 3, 1, work, over)).run())
            await asyncio.wait([running, led := asyncio.create_task(leads.wait())], return_when="FIRST_COMPLETED")
            led.cancel()
            if running.done():
                error = running.exception()
                return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
            hangs.set()
            await asyncio.sleep(HANGS_SECONDS)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return f"after {HANGS_SECONDS} s it {'still leads' if leads.is_set() else 'has stopped'}"

    yield "the API server is away at first", await elected("http://127.0.0.1:1")
    async with _server(answer) as url:
        yield "there is no Lease yet", await elected(url)
        lease.update(metadata={"name": "lease", "namespace": "team", "resourceVersion": "1"}, spec={})
        yield f"the server hangs, with a lease of {LEASE_SECONDS} s", await elected(url)


if __name__ == "__main__":
    typer.run(run)
