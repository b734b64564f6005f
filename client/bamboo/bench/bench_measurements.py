"""What `bamboo bench` measures on a machine, and in which order: a list of jobs and of plain training. Pure.

The sides of a group take turns: each runs once in every round, in an order that is turned from one to the next.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bamboo.bench.report import BenchModel, BenchPart, MachineFound
from bamboo.bench.sizes import QUICK, BenchSizes, bench_model
from bamboo_core.names import API_VERSION, KIND

MANY_STEPS: Final = 100_000
CHECK_STEPS: Final = 6
# The first is in the middle of step 3, of the owner of stage 1. Before the second there has to be a replica again,
# which with compiled layers takes longer than two steps.
KILLED: Final = ("at:3:1", "at:5:0")
EAGER, COMPILED = "one process, plain PyTorch", "one process, plain PyTorch, compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainWork:
    """Training in one process, without Bamboo."""

    job: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWork:
    """A job; one of MANY_STEPS is stopped when enough is measured. devices: that compute. preempt: as `bamboo run
    --preempt` takes it, for a job with few steps, whose bits are compared with those of an undisturbed one. kills: how
    many workers are killed at chosen moments. traced: add up what the workers' time goes to. sampled: look how much
    memory is in use.
    """

    job: Mapping[str, Any]
    devices: int
    preempt: tuple[str, ...] = ()
    kills: int = 0
    traced: bool = False
    sampled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileWork:
    """The measuring of the job's layers, as `bamboo profile` does it."""

    job: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMeasurement:
    """A measurement: see `report.Measured`. lacks: why it cannot be made here, a sentence; "" if it can."""

    part: BenchPart
    side: str
    work: PlainWork | JobWork | ProfileWork
    group: str = ""
    round: int = 0
    lacks: str = ""

    @property
    def key(self) -> str:
        return f"{self.part}: {self.group}: {self.side}: {self.round}"


def list_measurements(
    machine: MachineFound, sizes: BenchSizes, parts: Sequence[BenchPart], *, rounds: int, quick: bool
) -> list[PlannedMeasurement]:
    """All that is measured after the machine itself, in this order."""
    planner = _Planner(machine, sizes, rounds, quick)
    made = {
        BenchPart.MACHINE: lambda: iter(()),
        BenchPart.CHECKS: planner.checks,
        BenchPart.THROUGHPUT: planner.throughput,
        BenchPart.TRACE: planner.trace,
        BenchPart.PRICES: planner.prices,
        BenchPart.KILLS: planner.kills,
        BenchPart.MEMORY: planner.memory,
        BenchPart.PROFILE: planner.profile,
    }
    return [one for part in BenchPart if part in parts for one in made[part]()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """How a job differs from the one with one worker and no redundancy: sections of its manifest."""

    stages: int = 1
    training: dict[str, Any] = field(default_factory=dict)
    topology: dict[str, Any] = field(default_factory=dict)
    redundancy: dict[str, Any] = field(default_factory=lambda: {"mode": "None"})
    standby: int = 0
    devices: int = 1


@dataclass(frozen=True, slots=True)
class _Planner:
    """Lists the measurements of each part."""

    machine: MachineFound
    sizes: BenchSizes
    rounds: int
    quick: bool

    def checks(self) -> Iterator[PlannedMeasurement]:
        """Small jobs: the bits of another grid, of losses, and the losses of one process."""
        model = bench_model("a tiny Llama", QUICK, samples=2, microbatches=4, tokens=16)
        plain = _Variant(training={"steps": CHECK_STEPS})
        yield PlannedMeasurement(part=BenchPart.CHECKS, side=EAGER, work=PlainWork(job=job_document(model, plain)))
        for side, parts, lacks in self._checked():
            changed = {"stages": 2, "standby": 1, "redundancy": {"mode": "EagerForward"}, **parts}
            changed["training"] = {"steps": CHECK_STEPS, **parts.get("training", {})}
            variant = _Variant(**changed)
            work = JobWork(
                job=job_document(model, variant),
                devices=self._devices(variant),
                preempt=KILLED[:1] if variant.training.get("compile") else KILLED,
            )
            yield PlannedMeasurement(part=BenchPart.CHECKS, side=side, work=work, lacks=lacks)

    def _checked(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        yield "fp32, two losses", {}, ""
        if self.quick:
            return
        bf16 = {"precision": "bf16"}
        yield "bf16, copies in host memory", {"training": bf16, "redundancy": {"placement": "Host"}}, ""
        yield "bf16 parameters", {"training": {**bf16, "parameterPrecision": "bf16"}}, ""
        yield "fp16", {"training": {"precision": "fp16"}}, ""
        yield "zero bubble", {"topology": {"schedule": "ZBH1"}}, ""
        yield "two pipelines", {"topology": {"pipelines": 2}}, ""
        eager = {"redundancy": {"mode": "EagerBackward", "verify": "Report"}}
        yield "EagerBackward, verify: Report", eager, ""
        yield "two devices a worker", {"devices": 2}, self._lacks_devices(2)
        yield "compiled layers", {"training": {"compile": True}}, self._lacks_compiler

    def throughput(self) -> Iterator[PlannedMeasurement]:
        widest = self.sizes.workers[-1]
        sides: list[tuple[str, _Variant | None, str]] = [(EAGER, None, "")]
        compiled = _Variant(training={"compile": True})
        sides.append((COMPILED, None, self._lacks_compiler))
        sides += [(_workers(n), _Variant(stages=n), "") for n in self.sizes.workers]
        sides.append((f"{_workers(widest)}, zero bubble", _Variant(stages=widest, topology={"schedule": "ZBH1"}), ""))
        if not self.quick:
            sides += [
                (f"{_workers(widest)}, {other}", _Variant(stages=widest, training={"precision": other}), "")
                for other in self.machine.products
                if other != self.sizes.model.precision
            ]
            sides += [
                (
                    f"{_workers(widest)}, compiled",
                    _Variant(stages=widest, training=compiled.training),
                    self._lacks_compiler,
                ),
                (f"{widest} pipelines of one stage", _Variant(topology={"pipelines": widest}), ""),
            ]
            sides += [
                (f"1 worker with {n} devices", _Variant(devices=n), self._lacks_devices(n))
                for n in self.sizes.worker_devices
            ]
        made: list[tuple[str, PlainWork | JobWork, str]] = []
        for side, variant, lacks in sides:
            if variant is None:
                plain = compiled if side == COMPILED else _Variant()
                made.append((side, PlainWork(job=job_document(self.sizes.model, plain)), lacks))
            else:
                made.append((side, self._job(variant), lacks))
        yield from self._turns(BenchPart.THROUGHPUT, "", made)

    def trace(self) -> Iterator[PlannedMeasurement]:
        for mode in ("LazyForward",) if self.quick else ("None", "LazyForward"):
            work = self._job(self._grid(redundancy={"mode": mode}), traced=True)
            yield PlannedMeasurement(part=BenchPart.TRACE, side=mode, work=work)

    def prices(self) -> Iterator[PlannedMeasurement]:
        modes = [("redundancy: None", {"mode": "None"}), ("LazyForward", {"mode": "LazyForward"})]
        if not self.quick:
            modes += [
                ("LazyForward, copies in host memory", {"mode": "LazyForward", "placement": "Host"}),
                ("EagerForward", {"mode": "EagerForward"}),
                ("EagerBackward", {"mode": "EagerBackward"}),
                ("EagerBackward, verify: Report", {"mode": "EagerBackward", "verify": "Report"}),
            ]
        sides = [(side, self._job(self._grid(redundancy=part)), "") for side, part in modes]
        yield from self._turns(BenchPart.PRICES, "redundancy", sides)
        if self.quick:
            return
        alike = [
            (f"deterministic: {str(on).lower()}", self._job(_Variant(training={"deterministic": on})), "")
            for on in (False, True)
        ]
        yield from self._turns(BenchPart.PRICES, "determinism", alike)

    def kills(self) -> Iterator[PlannedMeasurement]:
        variant = self._grid(redundancy={"mode": "LazyForward"}, standby=1)
        work = self._job(variant, kills=self.sizes.kills)
        yield PlannedMeasurement(part=BenchPart.KILLS, side="LazyForward, one worker on standby", work=work)

    def memory(self) -> Iterator[PlannedMeasurement]:
        modes = ("LazyForward",) if self.quick else ("None", "LazyForward", "EagerForward")
        for mode in modes:
            work = self._job(self._grid(redundancy={"mode": mode}), sampled=True)
            yield PlannedMeasurement(part=BenchPart.MEMORY, side=mode, work=work)

    def profile(self) -> Iterator[PlannedMeasurement]:
        work = ProfileWork(job=job_document(self.sizes.model, _Variant()))
        yield PlannedMeasurement(part=BenchPart.PROFILE, side="layers", work=work)

    def _turns(
        self, part: BenchPart, group: str, sides: Sequence[tuple[str, PlainWork | JobWork, str]]
    ) -> Iterator[PlannedMeasurement]:
        """The sides in each round, in every second one the other way round; what cannot be made is listed once."""
        for number in range(self.rounds):
            for side, work, lacks in sides[:: -1 if number % 2 else 1]:
                if not lacks or number == 0:
                    yield PlannedMeasurement(part=part, group=group, side=side, work=work, round=number, lacks=lacks)

    def _grid(self, **sections: Any) -> _Variant:
        return _Variant(stages=self.sizes.stages, **sections)

    def _job(self, variant: _Variant, **how: Any) -> JobWork:
        return JobWork(job=job_document(self.sizes.model, variant), devices=self._devices(variant), **how)

    def _devices(self, variant: _Variant) -> int:
        """How many devices compute; workers on standby do not."""
        there = len(self.machine.devices) if self.machine.is_gpu else self.machine.cpus
        used: int = variant.stages * variant.topology.get("pipelines", 1)
        used *= variant.devices if self.machine.is_gpu else 1  # on a CPU its devices are one and the same
        return min(there, used)

    @property
    def _lacks_compiler(self) -> str:
        if self.quick:
            return "layers are not compiled with --quick"
        return f"torch.compile needs {self.machine.compiler}" if self.machine.compiler else ""

    def _lacks_devices(self, number: int) -> str:
        there = len(self.machine.devices)
        return f"there is one device of {number}" if self.machine.is_gpu and there < number else ""


def job_document(model: BenchModel, variant: _Variant) -> dict[str, Any]:
    """The job's manifest."""
    training = {
        "steps": MANY_STEPS,
        "globalBatchSize": model.samples * model.microbatches,
        "microBatchSize": model.samples,
        "seed": 0,
        "precision": model.precision,
        **variant.training,
    }
    spec = {
        "task": {"entrypoint": model.entrypoint, "config": model.config},
        "training": training,
        "topology": {"stages": variant.stages, **variant.topology},
        "redundancy": variant.redundancy,
        "standby": {"workers": variant.standby},
        "elastic": {"stragglerPolicy": "Ignore"},
        "worker": {"devices": variant.devices},
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "bench"}, "spec": spec}


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"
