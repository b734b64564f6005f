"""Every name that two parts must agree on: labels, environment, exit codes, ports. Standard library only."""

import re
from enum import StrEnum

GROUP = "bamboo.dev"
VERSION = "v1alpha1"  # of the API
KIND = "BambooJob"
PLURAL = "bamboojobs"
API_VERSION = f"{GROUP}/{VERSION}"

PROTOCOL_VERSION = 4
DATA_PLANE_VERSION = 5  # of what workers say to each other
LARGE_BODY = 1 << 20  # bytes of a frame's tensors, from which they are spread over a link's connections
FLOWS_PER_LINK = 4  # connections of a link
STATE_RATE = 500_000_000  # the most bytes a second at which a worker sends a whole state
NUMERICS_VERSION = 2  # raised with every change to Bamboo after which the same job ends with other bits

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNRECOVERABLE = 3  # not recoverable without a checkpoint
EXIT_FENCED = 4  # a worker that was declared lost
EXIT_DRAINED = 0
EXIT_INTERRUPTED = 130

ENV_WORKER = "BAMBOO_WORKER"  # set in a worker's pod, with those below
ENV_COORDINATOR = "BAMBOO_COORDINATOR"
ENV_TOKEN_FILE = "BAMBOO_TOKEN_FILE"  # noqa: S105 - the variable's name, not a secret
ENV_HOST = "POD_IP"
ENV_ZONE = "BAMBOO_ZONE"
ENV_GRACE = "BAMBOO_GRACE_SECONDS"  # seconds from SIGTERM to SIGKILL
ENV_LAUNCH = "BAMBOO_LAUNCH"  # of a local run's processes: which launcher they descend from
ENV_METRICS_PORT = "BAMBOO_METRICS_PORT"  # where the worker serves its own metrics; unset: nowhere
ENV_DEVICE = "BAMBOO_DEVICE"  # where a worker computes: cpu, cuda or cuda:N; unset: a GPU if there is one
ENV_CA = "BAMBOO_CA"  # PEM of the authority that signed the coordinator's certificate

WORKERS_PORT = 8765  # of the operator: control channels
WEB_PORT = 8080  # of the operator: health, metrics, job pages
METRICS_PORT = 8080  # of a worker's pod

HEARTBEAT_SECONDS = 0.5
HEARTBEAT_TIMEOUT_SECONDS = 5.0
RECONNECT_GRACE_SECONDS = 2.0
RECOVERY_SECONDS = 10.0  # a restarted coordinator waits that long for the others, once one has come back
ISOLATED_SECONDS = 30.0  # a coordinator that misses most workers at once waits that long before it gives them up
ALONE_SECONDS = 300.0  # and that long if it misses all; a restarted one then says that it hears nobody
ALL_BACK_SECONDS = 10.0  # from the first worker that comes back then until all others should have, too

TRAINER_CONTAINER = "trainer"  # a worker pod's container in which the worker runs
TOKEN_AUDIENCE = "bamboo.dev"  # noqa: S105 - of the workers' ServiceAccount tokens
PAGE_AUDIENCE = "bamboo.dev/page"  # of the tokens with which people look at job pages
TOKEN_SECONDS = 3600
TOKEN_FOLDER = "/var/run/secrets/bamboo.dev"  # noqa: S105
STORAGE_FOLDER = "/var/lib/bamboo"  # where a worker's pod has the job's volume claim
GRACE_SECONDS = 30  # what a worker's pod is given to leave

LABEL_JOB_NAME = f"{GROUP}/job-name"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_WORKER_INDEX = f"{GROUP}/worker-index"
LABEL_CAPACITY_TYPE = f"{GROUP}/capacity-type"
LABEL_NODE_POOL = f"{GROUP}/node-pool"
LABEL_ZONE = "topology.kubernetes.io/zone"  # of a node
LABEL_ZONE_GROUP = f"{GROUP}/zone-group"  # workers that are to be in the same zone; with spread ZonePerPipeline
LABEL_WORKER_REVISION = f"{GROUP}/worker-revision"  # a digest of what the operator made the pod of
LABEL_NOTICE_SECONDS = f"{GROUP}/notice-seconds"  # of a node: what its cloud leaves after a mark that names no time
NOTICE_SECONDS = re.compile(r"[1-9]\d{0,4}", re.ASCII)  # the label's value
LABEL_ACTIVE = f"{GROUP}/active"  # of the operator's pod that works, where there are several
KUEUE = "kueue.x-k8s.io"  # the API group of Kueue
LABEL_QUEUE = f"{KUEUE}/queue-name"
LABEL_QUEUE_PRIORITY = f"{KUEUE}/priority-class"
LABEL_QUEUE_MANAGED = f"{KUEUE}/managed"  # Kueue's webhook sets it on the pods that wait in a queue
QUEUE_GATE = f"{KUEUE}/admission"  # the scheduling gate of a pod that its queue has not admitted

NAME_LENGTH = 63  # of a DNS label


class DocumentUnit(StrEnum):
    """What of a text file is one document, for `bamboo tokenize`. A paragraph ends with a line that is blank."""

    FILE = "file"
    PARAGRAPH = "paragraph"
    LINE = "line"


def worker_name(job: str, number: int) -> str:
    """The name of a job's worker, which is also its pod's: a DNS label. Each incarnation has a number of its own."""
    suffix = f"-w{number}"
    if len(job) + len(suffix) <= NAME_LENGTH:
        return job + suffix
    import hashlib  # not before a command can be ended: everything imports this module

    suffix = f"-{hashlib.sha256(job.encode()).hexdigest()[:8]}{suffix}"
    return job[: NAME_LENGTH - len(suffix)].rstrip("-") + suffix
