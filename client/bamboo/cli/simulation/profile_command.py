"""`bamboo profile`: its flags and --help. Slow imports happen late."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from bamboo.cli.dispatch import usage
from bamboo.cli.output_files import Written, check_output_file
from bamboo.cli.simulation.job_file import job_of
from bamboo_core.complaints import complain, system_reason
from bamboo_core.names import EXIT_FAILED
from bamboo_core.option_groups import grouped
from bamboo_core.storage.durable import whole_file

app = typer.Typer(rich_markup_mode=None)
MEGABYTE = 1e6
MOST_SECONDS = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SurroundingOptions:
    """The surroundings of a profile as the user gave them: rates in megabytes a second, times in seconds."""

    flow: Annotated[
        float | None,
        typer.Option(
            metavar="MB/S",
            help="What one connection between two machines carries.",
            show_default="this machine's loopback",
        ),
    ] = None
    machine: Annotated[
        float | None,
        typer.Option(metavar="MB/S", help="What all connections of a machine carry.", show_default="as --flow"),
    ] = None
    latency: Annotated[float, typer.Option(metavar="SECONDS", help="Of a message between two machines.")] = 0.0
    storage_write: Annotated[
        float | None,
        typer.Option(metavar="MB/S", help="What a machine writes of checkpoints.", show_default="100"),
    ] = None
    storage_read: Annotated[
        float | None, typer.Option(metavar="MB/S", help="What it reads of them.", show_default="100")
    ] = None
    start: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="From a node that is there until its worker is ready.",
            show_default="loading the task here",
        ),
    ] = None
    detection: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Until a loss without notice is known.", show_default="the heartbeat timeout"
        ),
    ] = None


@app.command("profile")
@grouped
def profile_job(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A BambooJob manifest.")],
    output: Written = None,
    repeats: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=1000, help="Microbatches of each layer whose median counts."),
    ] = 10,
    seconds: Annotated[float, typer.Option(metavar="S", help="For measuring again what is not steady.")] = 60.0,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Compute instead what the layers take on a GPU that is not here, from a100 to v100.",
            show_default="measure on this machine",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What GPUs can do, for --device.", show_default="the table of Bamboo"),
    ] = None,
    *,
    options: SurroundingOptions,
) -> None:
    """Measure the job's layers on this machine's device, and write a profile for `bamboo simulate`.

    BAMBOO_DEVICE chooses the device. What the network, the store and the nodes do is given by flags.

    With --device the layers' operations are counted instead, and take as long as that GPU's figures say.

    Example: bamboo profile job.yaml --flow 625 --machine 1250 --start 60 --output profile.json
    Example: bamboo profile job.yaml --device a100 --output a100.json
    """
    from bamboo.local.trainer_calls.task_counts import count_task
    from bamboo.local.trainer_calls.task_profile import MachineOverrides, measure_task, surrounded
    from bamboo.profiles.analytic import analytic_profile
    from bamboo.profiles.files import read_devices
    from bamboo_core.planning.profile import ProfileError, to_json

    rates = ("flow", "machine", "storage_write", "storage_read")
    given = asdict(options)
    for name, value in given.items():
        if value is not None and not (0 < value <= 1e6 or (value == 0 and name not in rates)):
            usage(f"--{name.replace('_', '-')} {value:g}: expected a number above 0 and at most 1000000")
    if options.flow is not None and options.machine is not None and options.machine < options.flow:
        usage("--machine: expected at least --flow, since one connection cannot carry more than all")
    if not 0 <= seconds <= MOST_SECONDS:
        usage(f"--seconds {seconds:g}: expected a number from 0 to {MOST_SECONDS:.0f}")
    if devices is not None and device is None:
        usage("--devices: expected --device, which says the GPU in it")
    check_output_file("--output", output)
    source = job_of(job)
    around = MachineOverrides(**{n: v * MEGABYTE if n in rates and v is not None else v for n, v in given.items()})
    try:
        if device is not None:
            table = read_devices(devices)
            table.named(device)  # before anything is counted
            counts = count_task(source.spec, source.document, source.folders)
            found = surrounded(analytic_profile(counts, table, device), around)
        else:
            found = measure_task(source.spec, source.document, source.folders, repeats, around, seconds)
    except ProfileError as error:
        complain(error, str(job))
        raise typer.Exit(EXIT_FAILED) from None
    if output is None:
        sys.stdout.write(to_json(found).decode())
    else:
        try:
            with whole_file(output) as file:
                file.write(to_json(found))
        except OSError as error:
            complain(f"cannot write {output}: {system_reason(error)}")
            raise typer.Exit(EXIT_FAILED) from None
    if device is None and "layers.seconds" in found.estimated:
        typer.echo(f"warning: measure again on an idle machine: {found.sources['layers.seconds'].text}", err=True)
    forward, backward = (1000 * sum(getattr(x, kind) for x in found.layers) for kind in ("forward", "backward"))
    typer.echo(
        f"{len(found.layers)} layers on {found.device}: {forward + backward:.1f} ms a microbatch of {found.samples}"
        f" (forward {forward:.1f}, backward {backward:.1f}); estimated: {', '.join(found.estimated) or 'nothing'}",
        err=True,
    )
