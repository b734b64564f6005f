"""The operator's two ports and its calls to the API server, in a process with few file descriptors. For test_listener.

Arguments: how many descriptors, the API server's URL, and the folder with the certificate. Prints the two ports. A
worker that is heard gets an answer; a call to the API server that fails ends the process.
"""

import asyncio
import resource
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from bamboo_core.control.channel_events import ChannelEvent, Received
from bamboo_core.control.protocol import Stop
from bamboo_core.control.server import Channels
from bamboo_core.kube.kubeconfig import Access, ClusterServer, User
from bamboo_core.serving.descriptors import DescriptorShares, raise_limit
from bamboo_core.serving.listener import ConnectionBounds
from bamboo_operator.auth.pod_tokens import TokenReviewer, pod_authenticator
from bamboo_operator.auth.serving_certificate import ServingCertificate
from bamboo_operator.auth.worker_gateway import WorkerGateway
from bamboo_operator.http.server import WebServer
from bamboo_operator.kube.api_calls import ApiCallCounts
from bamboo_operator.kube.client import ApiClient, connect

JOB = ("team", "job")
OWN = 64  # descriptors that this process needs itself


async def main(server: str, folder: Path) -> None:
    shares = DescriptorShares.of(raise_limit(), OWN)
    access = Access(context="test", server=ClusterServer(url=server), user=User())
    api = ApiClient(connect(access, ApiCallCounts(), 4))
    gateway, web = (
        WorkerGateway(),
        WebServer(lambda: None, lambda: None, CollectorRegistry(), ConnectionBounds(unauthenticated=shares.visitors)),
    )

    def heard(event: ChannelEvent) -> None:
        if isinstance(event, Received):
            channels.send(event.worker, Stop(reason="Heard"))

    channels = Channels(heard, pod_authenticator(JOB, TokenReviewer(api), lambda worker: f"uid-of-{worker}"))
    gateway.open(JOB, channels)
    certificate = ServingCertificate(chain=folder / "tls.crt", key=folder / "tls.key", authority=folder / "ca.crt")
    bounds = ConnectionBounds(unauthenticated=shares.unauthenticated, known=shares.workers)
    print(
        await gateway.start("127.0.0.1", 0, certificate.context(), bounds), await web.start("127.0.0.1", 0), flush=True
    )
    while True:  # until it is killed
        await api.uid_of("/api/v1/namespaces/team/pods/any")
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    few = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (few // 2, few))
    asyncio.run(main(sys.argv[2], Path(sys.argv[3])))
