"""Every name that two parts must agree on: labels, environment, exit codes, ports. Standard library only."""

GROUP = "bamboo.dev"
VERSION = "v1alpha1"
KIND = "BambooJob"
API_VERSION = f"{GROUP}/{VERSION}"

PROTOCOL_VERSION = 1

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNRECOVERABLE = 3  # not recoverable without a checkpoint
EXIT_FENCED = 4  # a worker that was declared lost
EXIT_DRAINED = 0
EXIT_INTERRUPTED = 130

ENV_TOKEN = "BAMBOO_TOKEN"  # noqa: S105 - the variable's name, not a secret
ENV_COORDINATOR = "BAMBOO_COORDINATOR"

HEARTBEAT_SECONDS = 0.2
HEARTBEAT_TIMEOUT_SECONDS = 5.0
RECONNECT_GRACE_SECONDS = 2.0
RECOVERY_SECONDS = 10.0  # a restarted coordinator waits that long for the workers of the newest plan
