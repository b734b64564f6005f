"""Names and numbers that components share: labels, environment, exit codes, ports, times. Standard library only."""

import re
from enum import StrEnum

GROUP = "bamboo.dev"
VERSION = "v1alpha1"  # of the API
KIND = "BambooJob"
PLURAL = "bamboojobs"
API_VERSION = f"{GROUP}/{VERSION}"

PROTOCOL_VERSION = 4
DATA_PLANE_VERSION = 6  # of the protocol between workers
LARGE_BODY = 1 << 20  # bytes; frames with tensors of this size or more have connections of their own
FLOWS_PER_LINK = 4  # a link's connections for large frames
STATE_RATE = 500_000_000  # the most bytes per second at which a worker sends a whole state
NUMERICS_VERSION = 5  # raised with every change to Bamboo that changes the bits of a job's result

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNRECOVERABLE = 3  # not recoverable without a checkpoint
EXIT_FENCED = 4  # a worker that was declared lost
EXIT_DRAINED = 0
EXIT_INTERRUPTED = 130

ENV_WORKER = "BAMBOO_WORKER"  # set in a worker's pod, like the next ones
ENV_COORDINATOR = "BAMBOO_COORDINATOR"
ENV_TOKEN_FILE = "BAMBOO_TOKEN_FILE"  # noqa: S105 - the variable's name, not a secret
ENV_HOST = "POD_IP"
ENV_ZONE = "BAMBOO_ZONE"
ENV_GRACE = "BAMBOO_GRACE_SECONDS"  # seconds from SIGTERM to SIGKILL
ENV_LAUNCH = "BAMBOO_LAUNCH"  # in a local run's processes: the launcher that they descend from
ENV_METRICS_PORT = "BAMBOO_METRICS_PORT"  # port of the worker's own metrics; unset: not served
ENV_DEVICE = "BAMBOO_DEVICE"  # a worker's device: cpu, cuda or cuda:N; unset: a GPU if there is one
ENV_CA = "BAMBOO_CA"  # PEM of the authority that signed the coordinator's certificate

WORKERS_PORT = 8765  # of the operator: control channels
WEB_PORT = 8080  # of the operator: health, metrics, job pages
METRICS_PORT = 8080  # of a worker's pod

HEARTBEAT_SECONDS = 0.5
HEARTBEAT_TIMEOUT_SECONDS = 5.0
RECONNECT_GRACE_SECONDS = 2.0
RECOVERY_SECONDS = 10.0  # from the first reconnection on, a restarted coordinator waits this long for the other workers
ISOLATED_SECONDS = 30.0  # extra wait of a coordinator that misses most workers at once, before they count as lost
ALONE_SECONDS = 300.0  # the same if it misses all; a restarted coordinator then reports that no worker connects
ALL_BACK_SECONDS = 10.0  # after the first worker reconnects, all others should have reconnected within this time

TRAINER_CONTAINER = "trainer"  # a worker pod's container that runs the worker
TOKEN_AUDIENCE = "bamboo.dev"  # noqa: S105 - of the workers' ServiceAccount tokens
PAGE_AUDIENCE = "bamboo.dev/page"  # of the tokens with which people view job pages
TOKEN_SECONDS = 3600  # lifetime of both kinds of tokens
TOKEN_FOLDER = "/var/run/secrets/bamboo.dev"  # noqa: S105
STORAGE_FOLDER = "/var/lib/bamboo"  # mount path of the job's volume claim in a worker's pod
GRACE_SECONDS = 30  # termination grace period of a worker's pod

LABEL_JOB_NAME = f"{GROUP}/job-name"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_WORKER_INDEX = f"{GROUP}/worker-index"
LABEL_CAPACITY_TYPE = f"{GROUP}/capacity-type"
LABEL_NODE_POOL = f"{GROUP}/node-pool"
LABEL_ZONE = "topology.kubernetes.io/zone"  # of a node
LABEL_ZONE_GROUP = f"{GROUP}/zone-group"  # workers that should share a zone; with spread ZonePerPipeline
LABEL_WORKER_REVISION = f"{GROUP}/worker-revision"  # a digest of the operator's input for the pod
LABEL_NOTICE_SECONDS = f"{GROUP}/notice-seconds"  # of a node: length of the notice if a mark names no time
NOTICE_SECONDS = re.compile(r"[1-9]\d{0,4}", re.ASCII)  # the label's value
LABEL_ACTIVE = f"{GROUP}/active"  # of the active operator pod, where there are several
KUEUE = "kueue.x-k8s.io"  # the API group of Kueue
LABEL_QUEUE = f"{KUEUE}/queue-name"
LABEL_QUEUE_PRIORITY = f"{KUEUE}/priority-class"
LABEL_QUEUE_MANAGED = f"{KUEUE}/managed"  # set by Kueue's webhook on pods that wait in a queue
QUEUE_GATE = f"{KUEUE}/admission"  # the scheduling gate of a pod that its queue has not admitted

NAME_LENGTH = 63  # of a DNS label


class DocumentUnit(StrEnum):
    """The part of a text file that is one document, for `bamboo tokenize`."""

    FILE = "file"
    LINE = "line"


def worker_name(job: str, number: int) -> str:
    """Return the name of a job's worker and of its pod, JOB-wNUMBER. A long job name is cut and gets a hash, so that
    the result is a DNS label. A worker that replaces another has a number of its own.
    """
    suffix = f"-w{number}"
    if len(job) + len(suffix) <= NAME_LENGTH:
        return job + suffix
    import hashlib  # late, so that a command can be interrupted early: everything imports this module

    suffix = f"-{hashlib.sha256(job.encode()).hexdigest()[:8]}{suffix}"
    return job[: NAME_LENGTH - len(suffix)].rstrip("-") + suffix
