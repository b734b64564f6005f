"""The journeys of docs/where.md by their marks, which are named by the module and the name of a function."""

from collections.abc import Callable, Mapping
from typing import Any

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control.protocol import (
    CheckpointCommitted,
    CommitCheckpoint,
    Message,
    PartsWritten,
    Received,
    SendPlan,
)
from bamboo_core.coordinator.events import PreemptionNotice, SpecChanged
from bamboo_core.planning.plan import Cell
from bamboo_trainer.frames import Address, Frame, FrameKind
from bamboo_trainer.transport.base import Arrived
from journey import Journey, Mark, Through, at
from recorder import Said

Facts = Mapping[str, object] | None
Arguments = Mapping[str, Any]
CORE, OPERATOR, TRAINER = "bamboo_core", "bamboo_operator", "bamboo_trainer"
PLANNING, SIZING = "bamboo/cli", "bamboo/sizing"
COORDINATING, WAITING = "operator", {"through": Through.QUEUE}
MOVED = Cell(1, 1)  # whose owner's node is tainted

# what calls say


def _plan(message: Any) -> Facts:
    return {"epoch": message.plan.epoch} if isinstance(message, SendPlan) else None


def _about(kind: type) -> Callable[[Any], Facts]:
    """What messages of that kind say."""
    return lambda message: {"checkpoint": message.checkpoint} if isinstance(message, kind) else None


def _microbatch(address: Address) -> Facts:
    if address.kind is FrameKind.ACTIVATION and (address.pipeline, address.stage) == (0, 1):
        return {"step": address.step, "microbatch": address.microbatch}
    return None


def _tensor(frame: Frame) -> Facts:
    return _microbatch(frame.address)


def _forward(device: str) -> Said:
    """What an ordinary forward on such a device says: that of a stage after its first one."""

    def said(f: Arguments) -> Facts:
        usual = f["self"].has_run and f["self"].values.device.type == device
        return {"step": f["step"], "microbatch": f["microbatch"]} if usual else None

    return said


def _tainted(f: Arguments) -> Facts:
    tainted = f["node"] is not None and f["node"]["spec"].get("taints")
    return {"node": f["node"]["metadata"]["name"], "worker": f["pod"]["metadata"]["name"]} if tainted else None


def _moved(f: Arguments) -> Facts:
    plan = f["plan"]
    moved = plan.reason == "PlannedTakeover" and plan.has(MOVED)
    return {"epoch": plan.epoch, "heir": plan.at(MOVED).owner} if moved else None


# ways that several journeys take


def sent(to: str, said: Callable[[Any], Facts]) -> tuple[Mark, ...]:
    """The marks of a message to a worker, from when it is one of the turn's commands until it is on the network."""

    def of_worker(f: Arguments) -> Facts:
        found = said(f["message"])
        return None if found is None else {**found, to: f["worker"]}

    return (
        at(
            f"{CORE}/control/server.py Channels.send",
            COORDINATING,
            of_worker,
            taken_by="CoordinatorRunner.handle",
            **WAITING,
        ),
        at(f"{CORE}/control/codec.py Frames.of", COORDINATING, first=True),
        at(f"{CORE}/control/server.py _Channel.write", COORDINATING, lambda f: {to: f["self"].worker}, **WAITING),
    )


def heard(by: str, said: Callable[[Any], Facts]) -> tuple[Mark, ...]:
    """The marks of the same message in the worker, until it is in its inbox."""
    return (
        at(f"{CORE}/control/client.py Control._receive", by, through=Through.NETWORK),
        at(f"{CORE}/control/codec.py decode_from_coordinator", by),
        at(
            f"{TRAINER}/worker/agent.py Inbox.put",
            by,
            lambda f: said(f["item"]) if isinstance(f["item"], Message) else None,
        ),
    )


def obeyed(by: str) -> Mark:
    """The mark of a plan that is taken out of the inbox."""
    function = f"{TRAINER}/engine/engine.py Engine.obey"
    return at(function, by, lambda f: {"epoch": f["plan"].epoch}, taken_by="WorkerAgent._turn", **WAITING)


def told(by: str, said: Callable[[Any], Facts]) -> tuple[Mark, ...]:
    """The marks of a worker's message, until its coordinator takes it in."""
    return (
        at(f"{CORE}/control/client.py Control.send", by, lambda f: said(f["message"])),
        at(f"{CORE}/control/codec.py encode", by, lambda f: said(f["message"]), taken_by="Control._write", **WAITING),
        at(
            f"{CORE}/control/codec.py decode_from_worker",
            COORDINATING,
            through=Through.NETWORK,
            taken_by="Channels._receive",
        ),
        stepped(lambda event: said(event.message) if isinstance(event, Received) else None),
    )


def stepped(said: Callable[[Any], Facts]) -> Mark:
    """The mark of an event that is taken out of the coordinator's queue."""
    function = f"{CORE}/coordinator/coordinator.py step"
    return at(function, COORDINATING, lambda f: said(f["event"]), taken_by="CoordinatorRunner.handle", **WAITING)


def travelled(said: Callable[[Frame], Facts]) -> tuple[Mark, ...]:
    """The marks of a frame from one worker to another, until the receiver's engine takes it in."""

    def of_receiver(f: Arguments) -> Facts:
        found = said(f["frame"])
        return None if found is None else {**found, "receiver": f["peer"]}

    def arrived(item: Any) -> Facts:
        return said(item.frame) if isinstance(item, Arrived) else None

    return (
        at(f"{TRAINER}/transport/tcp.py TcpTransport.send", "sender", of_receiver),
        at(f"{TRAINER}/transport/wire.py encode_frame", "sender", lambda f: said(f["frame"])),
        at(
            f"{TRAINER}/transport/links.py Outbound.send",
            "sender",
            lambda f: {"receiver": f["self"].peer},
            first=True,
        ),
        at(
            f"{TRAINER}/transport/tcp.py TcpTransport.arrived",
            "receiver",
            lambda f: said(f["frame"]),
            through=Through.NETWORK,
            taken_by="Inbound._serve",
        ),
        at(f"{TRAINER}/worker/agent.py Inbox.put", "receiver", lambda f: arrived(f["item"])),
        at(
            f"{TRAINER}/engine/engine.py Engine.handle",
            "receiver",
            lambda f: arrived(f["event"]),
            taken_by="WorkerAgent._turn",
            **WAITING,
        ),
        at(f"{TRAINER}/frames.py read", "receiver", lambda f: said(f["frame"])),
    )


def stored(by: str, function: str) -> Mark:
    """The mark of a call of the store, which is made by a thread of its own."""
    return at(f"{CORE}/storage/local_files.py {function}", by, taken_by="BoundedCalls._run", **WAITING)


def checkpointed(by: str, message: type) -> Mark:
    """The mark of what the thread that writes checkpoints says of it."""
    function = f"{TRAINER}/checkpoint/checkpointing.py Checkpointing._tell"
    said = _about(message)
    return at(function, by, lambda f: said(f["message"]), taken_by="Checkpointing._handle", **WAITING)


def tensor(device: str, *leaving: Mark, arriving: tuple[Mark, ...] = ()) -> tuple[Mark, ...]:
    """The marks of a boundary tensor. leaving: from the outbox until it is in host memory. arriving: after that."""
    forward = f"{TRAINER}/stage/stage.py Stage.forward"
    return (
        at(forward, "sender", lambda f: _forward(device)(f) if f["self"].values.index == 0 else None),
        at(f"{TRAINER}/routing.py Outbox.emit", "sender", lambda f: _microbatch(f["address"])),
        *leaving,
        at(f"{TRAINER}/routing.py MessageLog.add", "sender", lambda f: _tensor(f["frame"])),
        *travelled(_tensor),
        at(f"{TRAINER}/engine/cell_step.py CellStep.accept", "receiver", lambda f: _tensor(f["frame"])),
        at(forward, "receiver", _forward(device), taken_by="Instructions._forward", **WAITING),
        *arriving,
    )


JOURNEYS = (
    Journey(
        "A taint on a node",
        "From the watch of nodes, over a plan for the next step's boundary, to the worker that takes the stage over.",
        (
            at(
                f"{OPERATOR}/watch_handlers.py watch_handlers.node",
                COORDINATING,
                lambda f: {"node": f["name"]} if f["_"]["body"]["spec"].get("taints") else None,
            ),
            at(f"{OPERATOR}/signals/signals.py worker_signal", COORDINATING, _tainted),
            at(
                f"{OPERATOR}/jobs/coordinator_runner.py CoordinatorRunner._heed",
                COORDINATING,
                lambda f: {"worker": f["seen"].worker} if isinstance(f["seen"], PreemptionNotice) else None,
                first=True,
            ),
            stepped(lambda event: {"worker": event.worker} if isinstance(event, PreemptionNotice) else None),
            at(
                f"{CORE}/coordinator/workers/membership.py notice",
                COORDINATING,
                lambda f: {"worker": f["worker"]},
            ),
            at(
                f"{CORE}/planning/transitions.py drain",
                COORDINATING,
                lambda f: {"worker": next(iter(f["view"].leaving), None)},
            ),
            at(f"{CORE}/coordinator/planner.py _issue", COORDINATING, _moved),
            *sent("heir", _plan),
            *heard("heir", _plan),
            obeyed("heir"),
            at(f"{TRAINER}/routing.py PlanState.offer", "heir", lambda f: {"epoch": f["plan"].epoch}),
            at(
                f"{TRAINER}/engine/executor.py Executor.take_over",
                "heir",
                lambda f: {"epoch": f["self"]._plan.current.epoch},  # noqa: SLF001  a recorded frame's
                **WAITING,
            ),
            at(
                f"{TRAINER}/engine/cell_step.py CellStep.start",
                "heir",
                lambda f: {} if f["self"].cell == MOVED else None,
            ),
        ),
    ),
    Journey(
        "An edit of `topology.schedule`",
        "From the watch of BambooJobs to the messages with a plan by another schedule.",
        (
            at(
                f"{OPERATOR}/watch_handlers.py watch_handlers.job_edited",
                COORDINATING,
                lambda f: {} if f["body"]["spec"]["topology"].get("schedule") == "ZBH1" else None,
            ),
            at(f"{OPERATOR}/jobs/reconciler.py JobReconciler.edited", COORDINATING),
            at(f"{CORE}/job/edits.py apply_edit_to_manifest", COORDINATING),
            at(
                f"{OPERATOR}/jobs/coordinator_runner.py CoordinatorRunner.tell",
                COORDINATING,
                lambda f: {} if isinstance(f["event"], SpecChanged) else None,
            ),
            stepped(lambda event: {} if isinstance(event, SpecChanged) else None),
            at(f"{CORE}/coordinator/coordinator.py _edit", COORDINATING),
            at(f"{CORE}/planning/transitions.py _reorder", COORDINATING),
            at(f"{CORE}/coordinator/planner.py _issue", COORDINATING, lambda f: {"epoch": f["plan"].epoch}),
            *sent("worker", _plan),
        ),
    ),
    Journey(
        "A boundary tensor",
        "From a stage's forward to the next stage's, between workers that compute on their CPUs.",
        tensor("cpu", at(f"{TRAINER}/memory/host_copies.py AtOnce.start", "sender", first=True)),
    ),
    Journey(
        "A boundary tensor of a GPU",
        "The same between workers with GPUs, which are pretended: it leaves when it is in host memory.",
        tensor(
            "cuda",
            at(f"{TRAINER}/memory/host_copies.py CudaCopies.start", "sender", first=True),
            at(
                f"{TRAINER}/routing.py Outbox._leave",
                "sender",
                lambda f: _microbatch(f["leaving"].address),
                kept_by="Outbox._leave_after",
                taken_by="Outbox.advance",
                **WAITING,
            ),
            arriving=(at(f"{TRAINER}/memory/host_copies.py CudaCopies.bring", "receiver", first=True),),
        ),
    ),
    Journey(
        "A checkpoint to its files",
        "From the commit that says that the state is kept to a layer's file, and to the coordinator.",
        (
            at(
                f"{TRAINER}/commit/committer.py Committer.record",
                "writer",
                lambda f: (
                    {"checkpoint": CheckpointId(step=f["step"] + 1, id=f["commit"].checkpoint.id)}
                    if f["commit"].checkpoint
                    else None
                ),
            ),
            at(
                f"{TRAINER}/engine/layer_copies.py LayerCopies._begin",
                "writer",
                lambda f: {"checkpoint": f["checkpoint"]},
                taken_by="Components._reached",
                **WAITING,
            ),
            at(f"{TRAINER}/stage/layer_state.py LateCopies.__init__", "writer"),
            at(
                f"{TRAINER}/checkpoint/checkpointing.py Checkpointing.keep",
                "writer",
                lambda f: {"checkpoint": f["checkpoint"]},
                kept_by="LayerCopies._begin",
                taken_by="LayerCopies.hand_over",
                **WAITING,
            ),
            at(f"{TRAINER}/checkpoint/layer_file.py encode", "writer", taken_by="Checkpointing._do_next", **WAITING),
            at(f"{CORE}/checkpoint/store.py CheckpointStore.write_part", "writer"),
            stored("writer", "LocalFiles.write"),
            checkpointed("writer", PartsWritten),
            *told("writer", _about(PartsWritten)),
            at(
                f"{CORE}/coordinator/checkpointing/checkpoints.py parts_written",
                COORDINATING,
                lambda f: {"checkpoint": f["message"].checkpoint},
            ),
        ),
    ),
    Journey(
        "A checkpoint to `saved`",
        "From the coordinator that has heard of all files, over the manifest, to its record.",
        (
            at(
                f"{CORE}/coordinator/checkpointing/checkpoints.py _commit",
                COORDINATING,
                lambda f: {"checkpoint": f["turn"].state.checkpoints.writing},
            ),
            *sent("writer", _about(CommitCheckpoint)),
            *heard("writer", _about(CommitCheckpoint)),
            at(
                f"{TRAINER}/checkpoint/checkpointing.py Checkpointing.commit",
                "writer",
                lambda f: {"checkpoint": f["request"].checkpoint},
                taken_by="WorkerAgent._turn",
                **WAITING,
            ),
            at(
                f"{CORE}/checkpoint/store.py CheckpointStore.commit",
                "writer",
                taken_by="Checkpointing._do_next",
                **WAITING,
            ),
            at(f"{CORE}/checkpoint/manifest.py encode", "writer"),
            stored("writer", "LocalFiles.create"),
            checkpointed("writer", CheckpointCommitted),
            *told("writer", _about(CheckpointCommitted)),
            at(
                f"{CORE}/coordinator/checkpointing/checkpoints.py checkpoint_committed",
                COORDINATING,
                lambda f: {"checkpoint": f["message"].checkpoint},
            ),
        ),
    ),
    Journey(
        "A checkpoint to another grid",
        "From the coordinator that has heard of it, with other stages, to the values of a stage.",
        (
            at(
                f"{CORE}/coordinator/checkpointing/restoring.py checkpoint_found",
                COORDINATING,
                lambda f: {"checkpoint": f["message"].checkpoint} if f["message"].checkpoint else None,
            ),
            at(
                f"{CORE}/planning/grid.py initial_plan",
                COORDINATING,
                lambda f: {"checkpoint": f["restore"]},
                taken_by="step",
                **WAITING,
            ),
            *sent("reader", _plan),
            *heard("reader", _plan),
            obeyed("reader"),
            at(
                f"{TRAINER}/checkpoint/checkpointing.py Checkpointing.restore",
                "reader",
                lambda f: {"checkpoint": f["checkpoint"]},
            ),
            at(f"{CORE}/checkpoint/store.py CheckpointStore.read_part", "reader"),
            at(f"{TRAINER}/checkpoint/layer_file.py decode", "reader"),
            at(f"{TRAINER}/stage/values.py StageValues.restore", "reader"),
            at(f"{TRAINER}/stage/layer_state.py restore", "reader"),
        ),
    ),
    Journey(
        "`bamboo plan`",
        "From the command line to the printed table.",
        tuple(
            at(function, "planner")
            for function in (
                "bamboo/__main__.py main",
                f"{PLANNING}/simulation_commands.py plan",
                f"{CORE}/job/yaml_file.py read_manifest_source",
                f"{CORE}/job/manifest.py parse_manifest",
                "bamboo/jobs/planning.py planned",
                f"{SIZING}/search.py search",
                f"{SIZING}/space.py grids",
                f"{SIZING}/estimate.py estimate",
                f"{SIZING}/trials/trial.py simulate_trial",
                f"{SIZING}/trials/world.py World.run",
                "bamboo/simulation/job/job_run.py simulate_job",
                "bamboo/simulation/job/job_record.py JobRecord.figures",
                f"{SIZING}/trials/trial.py outcome_of",
                f"{SIZING}/pareto.py front",
                f"{SIZING}/choice.py choose",
                "bamboo/terminal/plan_table.py plan_text",
            )
        ),
    ),
)
