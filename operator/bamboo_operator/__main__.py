"""The command `python -m bamboo_operator`, with which the Deployment runs the operator."""

import asyncio
import contextlib
import signal

import kopf
import typer

from bamboo_core.complaints import complain
from bamboo_core.kube.errors import RemoteError
from bamboo_core.names import EXIT_FAILED
from bamboo_core.option_groups import grouped
from bamboo_operator.flags import LeaseFlags, LogFlags, PortFlags, TlsFlags, WorkerFlags, operator_options
from bamboo_operator.kube.lease import LeaseLost
from bamboo_operator.process import OperatorOptions, heed_unclosed_watches, run_operator


@grouped
def command(ports: PortFlags, workers: WorkerFlags, tls: TlsFlags, lease: LeaseFlags, log: LogFlags) -> None:
    """Run BambooJobs in the cluster of the operator's pod or, outside a pod, in the cluster of the kubeconfig."""
    log.set_up()
    options = operator_options(ports, workers, tls, lease)
    try:
        asyncio.run(_until_signal(options))
    except (RemoteError, kopf.LoginError, LeaseLost) as error:
        complain(error, program="bamboo-operator")
        raise typer.Exit(EXIT_FAILED) from None
    except OSError as error:
        complain(error, "while the operator ran", program="bamboo-operator")
        raise typer.Exit(EXIT_FAILED) from None


async def _until_signal(options: OperatorOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(heed_unclosed_watches)
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    await run_operator(options, stop)


def main() -> None:
    typer.run(command)


if __name__ == "__main__":
    main()
