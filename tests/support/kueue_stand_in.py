"""Kueue on a cluster without it: its webhook, which the API server asks about every pod, and `kueue_manager`."""

import base64
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

import trustme

from bamboo_operator.kube.objects import utc_now
from cluster.client import MERGE, STRATEGIC, ApiError, Client, Json
from kueue_manager import FINALIZER, GROUP, Action, Admit, Finalize, Manager, Stop, defaulted, without_gates

CYCLE_SECONDS = 0.2
MUTATE, VALIDATE = "/mutate--v1-pod", "/validate--v1-pod"
HOOKS = "/apis/admissionregistration.k8s.io/v1"


class Webhook:
    """Kueue's webhook for the pods of one namespace. It fails closed: while away is set no pod can be created there."""

    def __init__(self, api: Client, namespace: str, folder: Path) -> None:
        self._api, self._name, self.away = api, f"kueue-{namespace}", False
        authority = trustme.CA()
        files = folder / "hook.crt", folder / "hook.key"
        mine = authority.issue_cert("127.0.0.1")
        mine.cert_chain_pems[0].write_to_path(files[0])
        mine.private_key_pem.write_to_path(files[1])
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*files)
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._url = f"https://127.0.0.1:{self._server.server_address[1]}"
        self._bundle = base64.b64encode(authority.cert_pem.bytes()).decode()
        self._selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
        self._thread = threading.Thread(target=self._server.serve_forever, name=self._name, daemon=True)

    def __enter__(self) -> "Webhook":
        self._thread.start()
        for kind, name, path, operations in (
            ("MutatingWebhookConfiguration", "mpod.kb.io", MUTATE, ["CREATE"]),
            ("ValidatingWebhookConfiguration", "vpod.kb.io", VALIDATE, ["CREATE", "UPDATE"]),
        ):
            rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": operations}
            hook = {
                "name": name,
                "clientConfig": {"url": self._url + path, "caBundle": self._bundle},
                "rules": [rule],
                "namespaceSelector": self._selector,
                "failurePolicy": "Fail",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
                "timeoutSeconds": 10,
            }
            made = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": self._name}}
            self._api.create({**made, "webhooks": [hook]})
        return self

    def __exit__(self, *_: object) -> None:
        for plural in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
            self._api.delete(f"{HOOKS}/{plural}/{self._name}")
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, request: Json) -> Json:
        response: Json = {"uid": request["uid"], "allowed": True}
        if path.startswith(MUTATE):
            made = defaulted(request["object"])
            changes = [{"op": "add", "path": f"/{part}", "value": made[part]} for part in ("metadata", "spec")]
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(changes).encode()).decode()}
        return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(webhook.answer(self.path, review["request"])).encode()
                self.send_response(503 if webhook.away else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


class StandIn:
    """Kueue for the pods of one namespace. The manager's quota, classes and order may be changed."""

    def __init__(self, api: Client, namespace: str, folder: Path) -> None:
        self._api, self.manager = api, Manager(0)
        self._webhook = Webhook(api, namespace, folder)
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"manager of {namespace}", daemon=True)

    def __enter__(self) -> "StandIn":
        self._webhook.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.set_away(False)
        self._stopping.set()
        self._thread.join()
        self._webhook.__exit__()
        for pod in self.pods():  # nobody else would
            self._release(pod)
        print(*self.manager.log, sep="\n")
        if self._error is not None:
            raise self._error

    @property
    def used(self) -> int:
        """The pods whose quota is held."""
        return self.manager.used(self.pods())

    def pods(self) -> list[Json]:
        """Those in a queue."""
        found: list[Json] = self._api.get(self._path, labelSelector=f"{GROUP}/managed=true")["items"]
        return found

    def set_away(self, away: bool) -> None:
        """Kueue does not run: its webhooks do not answer, and nobody admits, preempts or finalizes."""
        self._webhook.away = away

    def _run(self) -> None:
        try:
            while not self._stopping.wait(CYCLE_SECONDS):
                if not self._webhook.away:
                    for action in self.manager.step(self.pods()):
                        self._act(action)
        except Exception as error:
            self._error = error

    def _act(self, action: Action) -> None:
        """A pod that is gone meanwhile, or has changed, is looked at in the next cycle."""
        path = f"{self._path}/{action.pod['metadata']['name']}"
        try:
            match action:
                case Finalize(pod=pod):
                    self._release(pod)
                case Admit(pod=pod):
                    version = {"resourceVersion": pod["metadata"]["resourceVersion"]}
                    self._api.patch(path, {"metadata": version, "spec": {"schedulingGates": without_gates(pod)}}, MERGE)
                case Stop():
                    condition = action.condition(utc_now())
                    self._api.patch(f"{path}/status", {"status": {"conditions": [condition]}}, STRATEGIC)
                    self._api.delete(path)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    def _release(self, pod: Json) -> None:
        left = [one for one in pod["metadata"].get("finalizers") or () if one != FINALIZER]
        try:
            self._api.patch(f"{self._path}/{pod['metadata']['name']}", {"metadata": {"finalizers": left}}, MERGE)
        except ApiError as error:
            if error.code != 404:
                raise
