"""`bamboo profile`: its flags and --help. Slow imports happen late."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from bamboo.cli.dispatch import usage
from bamboo.cli.output_files import Written, check_output_file
from bamboo.cli.simulation.job_file import job_of
from bamboo_core.complaints import complain, system_reason
from bamboo_core.names import EXIT_FAILED
from bamboo_core.storage.durable import whole_file

app = typer.Typer(rich_markup_mode=None)
MEGABYTE = 1e6
MOST_SECONDS = 1800.0


@app.command("profile")
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
    flow: Annotated[
        float | None,
        typer.Option(
            metavar="MB/S",
            help="What one connection between two machines carries.",
            show_default="this machine's loopback",
        ),
    ] = None,
    machine: Annotated[
        float | None,
        typer.Option(metavar="MB/S", help="What all connections of a machine carry.", show_default="as --flow"),
    ] = None,
    start: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="From a node that is there until its worker is ready.",
            show_default="loading the task here",
        ),
    ] = None,
) -> None:
    """Measure the job's layers on this machine's device, and write a profile for `bamboo simulate`.

    BAMBOO_DEVICE chooses the device. Flags say what the network and the nodes do.

    With --device the layers' operations are counted instead, and take as long as that GPU's figures say.

    Example: bamboo profile job.yaml --flow 625 --machine 1250 --start 60 --output profile.json
    Example: bamboo profile job.yaml --device a100 --output a100.json
    """
    from bamboo.local.trainer_calls.task_profile import count_task, measure_task, surrounded
    from bamboo.profiles.files import AT, read_profile
    from bamboo_core.planning.profile import ProfileError, to_json

    for name, value in (("flow", flow), ("machine", machine), ("start", start)):
        if value is not None and not (0 < value <= 1e6 or (value == 0 and name == "start")):
            usage(f"--{name} {value:g}: expected a number above 0 and at most 1000000")
    if flow is not None and machine is not None and machine < flow:
        usage("--machine: expected at least --flow, since one connection cannot carry more than all")
    if not 0 <= seconds <= MOST_SECONDS:
        usage(f"--seconds {seconds:g}: expected a number from 0 to {MOST_SECONDS:.0f}")
    check_output_file("--output", output)
    source = job_of(job)
    try:
        if device is not None:
            found = read_profile(f"{AT}{device}", lambda: count_task(source))
        else:
            found = measure_task(source, repeats, seconds)
    except ProfileError as error:
        complain(error, str(job))
        raise typer.Exit(EXIT_FAILED) from None
    one, all_of_them = (None if rate is None else rate * MEGABYTE for rate in (flow, machine))
    found = surrounded(found, flow=one, machine=all_of_them, start=start)
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
