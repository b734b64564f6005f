"""`python -m bamboo_trainer`: one worker, as a pod's container runs it. Environment variables hold all settings."""

import io
import os
import sys
from pathlib import Path

from bamboo_core.names import (
    ENV_CA,
    ENV_COORDINATOR,
    ENV_GRACE,
    ENV_HOST,
    ENV_METRICS_PORT,
    ENV_TOKEN_FILE,
    ENV_WORKER,
    ENV_ZONE,
    EXIT_USAGE,
    GRACE_SECONDS,
)
from bamboo_trainer.worker.launcher import lasting_imports

LEAST_LOGGER_SECONDS = 5.0  # of the pod's grace period for loggers, and as many for the rest of the shutdown

HELP = f"""usage: python -m bamboo_trainer

Runs one worker of a BambooJob until the coordinator tells it to stop. Bamboo's operator starts it; by hand it needs:
  {ENV_WORKER}       the worker's name, in a cluster the pod's
  {ENV_COORDINATOR}  the coordinator's address, ws://HOST:PORT/PATH or wss://...
  {ENV_TOKEN_FILE}   a file with the token that proves who this is; read again at every connection
  {ENV_HOST}         the address at which other workers reach this one (default 127.0.0.1)
  {ENV_ZONE}         the failure domain it is in (optional)
  {ENV_CA}           PEM of the authority that signed a wss: coordinator's certificate (default: the system's)
  {ENV_GRACE}        seconds from SIGTERM to SIGKILL (default {GRACE_SECONDS})
  {ENV_METRICS_PORT}  port of that address for its own metrics (default: none)
  BAMBOO_DEVICE       cpu, cuda or cuda:N (default: a GPU if there is one)
SIGTERM counts as a notice: the worker hands over its stages and ends."""


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(HELP)
        return 0
    missing = [name for name in (ENV_WORKER, ENV_COORDINATOR, ENV_TOKEN_FILE) if not os.environ.get(name)]
    if missing or len(sys.argv) > 1:
        wrong = f"{', '.join(missing)} must be set" if missing else f"unexpected argument {sys.argv[1]!r}"
        print(f"bamboo_trainer: {wrong} (see python -m bamboo_trainer --help)", file=sys.stderr)
        return EXIT_USAGE
    try:
        grace = _grace(os.environ.get(ENV_GRACE))
        metrics_port = _port(os.environ.get(ENV_METRICS_PORT))
    except ValueError as error:
        print(f"bamboo_trainer: {error} (see python -m bamboo_trainer --help)", file=sys.stderr)
        return EXIT_USAGE
    with lasting_imports():  # torch takes seconds: not for --help
        import torch._dynamo  # noqa: F401  # the first optimizer imports it in any case, in the middle of the first step

        from bamboo_trainer.worker.agent import WorkerSettings
        from bamboo_trainer.worker.process import main as run

    settings = WorkerSettings(
        host=os.environ.get(ENV_HOST) or "127.0.0.1",
        grace=grace,
        authority=os.environ.get(ENV_CA, ""),
        metrics_port=metrics_port,
        logger_seconds=max(LEAST_LOGGER_SECONDS, grace - LEAST_LOGGER_SECONDS),
        pod=True,
    )
    return run(
        worker=os.environ[ENV_WORKER],
        url=os.environ[ENV_COORDINATOR],
        token=Path(os.environ[ENV_TOKEN_FILE]),
        zone=os.environ.get(ENV_ZONE, ""),
        settings=settings,
    )


def _grace(text: str | None) -> float:
    """Parse the grace period in seconds; None gives GRACE_SECONDS. Raises ValueError unless `text` is all digits."""
    if text is None:
        return GRACE_SECONDS
    if not text.isdecimal():
        raise ValueError(f'{ENV_GRACE}: expected a number of seconds, got "{text[:20]}"')
    return float(text)


def _port(text: str | None) -> int | None:
    """Return the metrics port; None if `text` is None or empty. Raises ValueError unless it is from 1 to 65535."""
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ValueError(f'{ENV_METRICS_PORT}: expected a port, got "{text[:20]}"')
    return int(text)


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # shows what a task prints at once, before the pod is lost
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a dataset's thread that hangs must not keep the pod alive
