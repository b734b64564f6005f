"""`python -m bamboo_trainer`: one worker, as a pod's container runs it. Everything comes from the environment."""

import logging
import os
import sys
from pathlib import Path

from bamboo.names import (
    ENV_COORDINATOR,
    ENV_HOST,
    ENV_METADATA,
    ENV_METADATA_ACKNOWLEDGE,
    ENV_METADATA_REBALANCE,
    ENV_METADATA_URL,
    ENV_TOKEN_FILE,
    ENV_WORKER,
    ENV_ZONE,
    EXIT_USAGE,
)
from bamboo_trainer.metadata import wanted

HELP = f"""usage: python -m bamboo_trainer

Runs one worker of a BambooJob until the coordinator tells it to stop. Bamboo's operator starts it; by hand it needs:
  {ENV_WORKER}       the worker's name, in a cluster the pod's
  {ENV_COORDINATOR}  the coordinator's address, ws://HOST:PORT/PATH
  {ENV_TOKEN_FILE}   a file with the token that proves who this is; read again at every connection
  {ENV_HOST}         the address at which other workers reach this one (default 127.0.0.1)
  {ENV_ZONE}         the failure domain it is in (optional)
  BAMBOO_DEVICE       cpu, cuda or cuda:N (default: a GPU if there is one)
SIGTERM is taken as a notice: the worker hands its part over and leaves. So is what the node's cloud says, if asked:
  {ENV_METADATA}              whose metadata endpoint is watched: aws, gcp, azure, auto or off (default off)
  {ENV_METADATA_URL}          the endpoint's address, http://HOST[:PORT], if it is not the usual one
  {ENV_METADATA_REBALANCE}    true: a rebalance recommendation of AWS is a notice, too (default: only logged)
  {ENV_METADATA_ACKNOWLEDGE}  true: once the worker has left, Azure need not wait (default false)"""


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
        metadata = wanted(os.environ)
    except ValueError as error:
        print(f"bamboo_trainer: {error} (see python -m bamboo_trainer --help)", file=sys.stderr)
        return EXIT_USAGE
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from bamboo_trainer.worker import main as run  # torch takes seconds: not for --help

    return run(
        worker=os.environ[ENV_WORKER],
        url=os.environ[ENV_COORDINATOR],
        token=Path(os.environ[ENV_TOKEN_FILE]),
        zone=os.environ.get(ENV_ZONE, ""),
        host=os.environ.get(ENV_HOST) or "127.0.0.1",
        metadata=metadata,
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # NB: a dataset's thread that hangs must not keep the pod
