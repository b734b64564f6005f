"""The commands `list`, `status` and `events`, which show jobs and their events, once or repeatedly."""

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from bamboo.remote.job_reader import JobReader
from bamboo.remote.session import Session, Target, patiently
from bamboo.remote.watch import until_over
from bamboo.terminal import picture
from bamboo.terminal.output_format import OutputFormat
from bamboo.terminal.snapshot import JobSnapshot, UnseenEvents
from bamboo_core.kube.errors import UsageError
from bamboo_core.names import EXIT_OK
from bamboo_core.view.job_view import view_of


def print_objects(found: list[dict[str, Any]], *, single: bool) -> None:
    """Print objects as JSON, as the API server has them, but without managedFields.

    managedFields are also deleted from `found`. single: print only the first object, not a List.
    """
    for body in found:
        body.get("metadata", {}).pop("managedFields", None)
    whole = found[0] if single else {"apiVersion": "v1", "kind": "List", "items": found}
    print(json.dumps(whole, indent=2))


async def jobs(session: Session, names: list[Target], *, everywhere: bool, form: OutputFormat) -> int:
    bodies = await _found(session, names, everywhere)
    if form is OutputFormat.JSON:
        print_objects(bodies, single=len(names) == 1)
        return EXIT_OK
    if not bodies:
        session.say("no jobs" if everywhere else f"no jobs in namespace {session.namespace}")
        return EXIT_OK
    found = sorted(map(view_of, bodies), key=lambda job: (job.namespace, job.name))
    session.console.print(picture.jobs(found, datetime.now(UTC), namespaces=everywhere))
    return EXIT_OK


async def _found(session: Session, names: list[Target], everywhere: bool) -> list[dict[str, Any]]:
    if names:
        return list(await asyncio.gather(*(session.api.job(*session.of(name)) for name in names)))
    return await session.api.jobs(None if everywhere else session.namespace)


async def status(session: Session, name: Target, *, form: OutputFormat, watch: bool, interval: float) -> int:
    if watch:
        if form is not OutputFormat.TEXT:
            raise UsageError(f"--output {form}: cannot be watched; leave out one of --output and --watch")
        return await until_over(session, *session.of(name), interval=interval)
    if form is OutputFormat.JSON:
        print_objects([await session.api.job(*session.of(name))], single=True)
        return EXIT_OK
    snapshot = await JobReader(session.api, *session.of(name)).snapshot()
    session.console.print(picture.status(snapshot, datetime.now(UTC), session.console.width))
    return EXIT_OK


async def events(session: Session, name: Target, *, form: OutputFormat, follow: bool, interval: float) -> int:
    """Print the events of the job and its pods, oldest first; with `follow` new ones too, until the job is over."""
    if follow and form is not OutputFormat.TEXT:
        raise UsageError(f"--output {form}: cannot be followed; leave out one of --output and --follow")
    job_reader, unseen = JobReader(session.api, *session.of(name)), UnseenEvents()
    while True:
        snapshot = await patiently(lambda: job_reader.snapshot(pod_events=True))
        if form is OutputFormat.JSON:
            _print_events(snapshot)
            return EXIT_OK
        if snapshot.missing and not follow:
            session.console.print(*(Text(f"not shown: {what}", style="dim") for what in snapshot.missing), sep="\n")
        new = unseen.of(snapshot.events)
        for line in picture.events(new, datetime.now(UTC), snapshot.job, times=follow):
            session.console.print(line, soft_wrap=True)
        if not follow:
            if not snapshot.events:
                session.say("no events: they are kept for an hour by most clusters")
            return EXIT_OK
        if snapshot.job.status.ended:
            return EXIT_OK
        await asyncio.sleep(interval)


def _print_events(snapshot: JobSnapshot) -> None:
    rows = [
        {
            "time": one.at.astimezone(UTC).isoformat(),
            "about": one.about,
            "warning": one.warning,
            "reason": one.reason,
            "message": one.message,
            "count": one.count,
        }
        for one in snapshot.events
    ]
    print(json.dumps(rows, indent=2))
