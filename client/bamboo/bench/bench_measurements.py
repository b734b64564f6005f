"""What `bamboo bench` measures on a machine, and in which order: a list of jobs and of plain training. Pure.

The sides of a group take turns: each runs once in every round, what tells most first. Every second round goes the other
way round, but for the side that all are compared with: without it a round that no time is left for says nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bamboo.bench.clock import PART_SECONDS, Expected, expected_seconds
from bamboo.bench.report import BenchModel, BenchPart, MachineFound
from bamboo.bench.sizes import BenchSizes, Load, MeasuredModel, lacks_memory, tiny_model
from bamboo_core.names import API_VERSION, KIND

MANY_STEPS: Final = 100_000
CHECK_STEPS: Final = 6
# The first is in the middle of step 3, of the owner of stage 1. Before the second there has to be a replica again,
# which with compiled layers takes longer than two steps.
KILLED: Final = ("at:3:1", "at:5:0")
ESTIMATING: Final = 20.0  # seconds for the memory's estimate, or to count a model's operations
EAGER, COMPILED = "one process, plain PyTorch", "one process, plain PyTorch, compiled"
NO_LARGER: Final = "a larger model"


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
class CountWork:
    """The counting of the model's operations, where the training that would count them has no room. why: it has none, a
    sentence.
    """

    job: Mapping[str, Any]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileWork:
    """The measuring of the job's layers, as `bamboo profile` does it."""

    job: Mapping[str, Any]


Work = PlainWork | JobWork | CountWork | ProfileWork


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMeasurement:
    """A measurement: see `report.Measured`. lacks: why it cannot be made here, a sentence; "" if it can. expected:
    seconds that it may take, a guess.
    """

    part: BenchPart
    side: str
    work: Work
    expected: float
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
        BenchPart.LARGER: planner.larger,
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

    @property
    def compiled(self) -> bool:
        return bool(self.training.get("compile"))

    @property
    def workers(self) -> int:
        pipelines: int = self.topology.get("pipelines", 1)
        return self.stages * pipelines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """A side of a group. variant: of a job; plain: it is trained in one process, without Bamboo."""

    name: str
    variant: _Variant = field(default_factory=_Variant)
    plain: bool = False


@dataclass(frozen=True, slots=True)
class _Planner:
    """Lists the measurements of each part."""

    machine: MachineFound
    sizes: BenchSizes
    rounds: int
    quick: bool

    def checks(self) -> Iterator[PlannedMeasurement]:
        """Small jobs: the bits of another grid, of losses, and the losses of one process."""
        tiny, plain = tiny_model(), _Variant(training={"steps": CHECK_STEPS})
        yield PlannedMeasurement(
            part=BenchPart.CHECKS,
            side=EAGER,
            work=PlainWork(job=job_document(tiny.model, plain)),
            expected=self._expected(tiny, plain, tiny=True),
        )
        for side, parts, lacks in self._checked():
            changed = {"stages": 2, "standby": 1, "redundancy": {"mode": "EagerForward"}, **parts}
            changed["training"] = {"steps": CHECK_STEPS, **parts.get("training", {})}
            variant = _Variant(**changed)
            work = JobWork(
                job=job_document(tiny.model, variant),
                devices=self._devices(variant),
                preempt=KILLED[:1] if variant.compiled else KILLED,
            )
            expected = self._expected(tiny, variant, tiny=True, runs=2)
            yield PlannedMeasurement(part=BenchPart.CHECKS, side=side, work=work, lacks=lacks, expected=expected)

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
        yield "EagerBackward", {"redundancy": {"mode": "EagerBackward"}}, ""
        yield "two devices a worker", {"devices": 2}, self._lacks_devices(2)
        yield "compiled layers", {"training": {"compile": True}}, self._lacks_compiler

    def throughput(self) -> Iterator[PlannedMeasurement]:
        counts, widest = self.sizes.workers, self.sizes.workers[-1]
        *widest_ones, both = self._widest()
        sides = [*self._one_process(), _Side(name=_workers(1)), *widest_ones]
        if self.quick:
            yield from self._turns(BenchPart.THROUGHPUT, "", self.sizes.usual, sides)
            return
        several = [_Side(name=f"1 worker with {n} devices", variant=_Variant(devices=n)) for n in self._several]
        pipelines = _Variant(topology={"pipelines": widest})
        sides += several[:1]
        sides += [_Side(name=_workers(n), variant=_Variant(stages=n)) for n in counts[1:-1]]
        sides += [_Side(name=f"{widest} pipelines of one stage", variant=pipelines), both, *several[1:]]
        sides += [
            _Side(name=f"{_workers(widest)}, {other}", variant=_Variant(stages=widest, training={"precision": other}))
            for other in self.machine.products
            if other != self.sizes.usual.model.precision
        ]
        yield from self._turns(BenchPart.THROUGHPUT, "", self.sizes.usual, sides)

    def larger(self) -> Iterator[PlannedMeasurement]:
        """The larger model: in one process, and on all devices."""
        if (model := self.sizes.larger) is None:
            yield PlannedMeasurement(
                part=BenchPart.LARGER,
                side=NO_LARGER,
                work=PlainWork(job=job_document(self.sizes.usual.model, _Variant())),
                expected=0.0,
                lacks=self.sizes.why_none_larger,
            )
            return
        several = [_Side(name=f"1 worker with {n} devices", variant=_Variant(devices=n)) for n in self._several[:1]]
        plain, compiled = self._one_process()
        yield from self._turns(BenchPart.LARGER, "", model, [plain, *self._widest(), *several, compiled])

    def _one_process(self) -> list[_Side]:
        return [
            _Side(name=EAGER, plain=True),
            _Side(name=COMPILED, plain=True, variant=_Variant(training={"compile": True})),
        ]

    def _widest(self) -> list[_Side]:
        """The pipeline over all devices, with each schedule, as it is and compiled."""
        widest, late, compiled = self.sizes.workers[-1], {"schedule": "ZBH1"}, {"compile": True}
        both = _Variant(stages=widest, training=compiled, topology=late)
        return [
            _Side(name=_workers(widest), variant=_Variant(stages=widest)),
            _Side(name=f"{_workers(widest)}, zero bubble", variant=_Variant(stages=widest, topology=late)),
            _Side(name=f"{_workers(widest)}, compiled", variant=_Variant(stages=widest, training=compiled)),
            _Side(name=f"{_workers(widest)}, zero bubble, compiled", variant=both),
        ]

    def trace(self) -> Iterator[PlannedMeasurement]:
        for mode in ("LazyForward",) if self.quick else ("None", "LazyForward"):
            yield self._one(BenchPart.TRACE, mode, self._grid(redundancy={"mode": mode}), traced=True)

    def prices(self) -> Iterator[PlannedMeasurement]:
        modes = [("redundancy: None", {"mode": "None"}), ("LazyForward", {"mode": "LazyForward"})]
        if not self.quick:
            modes += [
                ("EagerForward", {"mode": "EagerForward"}),
                ("EagerBackward", {"mode": "EagerBackward"}),
                ("LazyForward, copies in host memory", {"mode": "LazyForward", "placement": "Host"}),
            ]
        redundant = [_Side(name=name, variant=self._grid(redundancy=part)) for name, part in modes]
        alike = [
            _Side(name=f"deterministic: {str(on).lower()}", variant=_Variant(training={"deterministic": on}))
            for on in (False, True)
        ]
        groups = [("redundancy", redundant)] + ([] if self.quick else [("determinism", alike)])
        by_group = [list(self._turns(BenchPart.PRICES, group, self.sizes.usual, sides)) for group, sides in groups]
        yield from sorted((one for group in by_group for one in group), key=lambda one: one.round)

    def kills(self) -> Iterator[PlannedMeasurement]:
        variant, around = self._grid(redundancy={"mode": "LazyForward"}, standby=1), PART_SECONDS[BenchPart.KILLS] / 2
        name = "LazyForward, one worker on standby"
        yield self._one(BenchPart.KILLS, name, variant, around=around, kills=self.sizes.kills)

    def memory(self) -> Iterator[PlannedMeasurement]:
        modes = ("LazyForward",) if self.quick else ("None", "LazyForward", "EagerForward")
        for mode in modes:
            variant = self._grid(redundancy={"mode": mode})
            yield self._one(BenchPart.MEMORY, mode, variant, around=ESTIMATING, sampled=True)

    def profile(self) -> Iterator[PlannedMeasurement]:
        usual, variant = self.sizes.usual, _Variant()
        work = ProfileWork(job=job_document(usual.model, variant))
        expected = self._expected(usual, variant, around=3 * self.sizes.seconds)
        yield PlannedMeasurement(part=BenchPart.PROFILE, side="layers", work=work, expected=expected)

    def _one(
        self, part: BenchPart, side: str, variant: _Variant, *, around: float = 0.0, **how: Any
    ) -> PlannedMeasurement:
        """A measurement of the usual model that takes no turns. around: seconds beside the job. how: of `JobWork`."""
        usual = self.sizes.usual
        return PlannedMeasurement(
            part=part,
            side=side,
            work=JobWork(job=job_document(usual.model, variant), devices=self._devices(variant), **how),
            lacks=self._lacks_memory(usual, variant),
            expected=self._expected(usual, variant, around=around),
        )

    def _turns(
        self, part: BenchPart, group: str, of: MeasuredModel, sides: Sequence[_Side]
    ) -> Iterator[PlannedMeasurement]:
        """The sides in each round; what cannot be made is listed once."""
        for number in range(self.rounds):
            for side in turned(sides) if number % 2 else sides:
                lacks = self._lacks(of, side)
                if lacks and number:
                    continue
                job = job_document(of.model, side.variant)
                work: Work
                if lacks and side.name == EAGER:
                    work, lacks = CountWork(job=job, why=lacks), ""
                elif side.plain:
                    work = PlainWork(job=job)
                else:
                    work = JobWork(job=job, devices=self._devices(side.variant))
                expected = ESTIMATING if isinstance(work, CountWork) else self._expected(of, side.variant)
                yield PlannedMeasurement(
                    part=part, group=group, side=side.name, work=work, round=number, lacks=lacks, expected=expected
                )

    def _expected(
        self, of: MeasuredModel, variant: _Variant, *, around: float = 0.0, runs: int = 1, tiny: bool = False
    ) -> float:
        what = Expected(
            devices=self._devices(variant),
            stages=variant.stages * variant.devices,
            processes=variant.stages,
            precision=variant.training.get("precision", of.model.precision),
            compiled=variant.compiled,
            around=around,
            runs=runs,
            tiny=tiny,
        )
        return expected_seconds(what, of, self.machine, self.sizes)

    def _grid(self, **sections: Any) -> _Variant:
        return _Variant(stages=self.sizes.stages, **sections)

    @property
    def _several(self) -> tuple[int, ...]:
        """How many devices a worker has that has several, the most first."""
        return self.sizes.worker_devices[::-1]

    def _devices(self, variant: _Variant) -> int:
        """How many devices compute; workers on standby do not."""
        there = len(self.machine.devices) if self.machine.is_gpu else self.machine.cpus
        each = variant.devices if self.machine.is_gpu else 1  # on a CPU its devices are one and the same
        return min(there, variant.workers * each)

    def _lacks(self, of: MeasuredModel, side: _Side) -> str:
        if side.variant.compiled and self._lacks_compiler:
            return self._lacks_compiler
        return self._lacks_devices(side.variant.devices) or self._lacks_memory(of, side.variant)

    def _lacks_memory(self, of: MeasuredModel, variant: _Variant) -> str:
        mode = variant.redundancy["mode"]
        load = Load(
            stages=variant.stages * variant.devices,
            pipelines=variant.topology.get("pipelines", 1),
            sharing=-(-variant.workers // len(self.machine.devices)),
            replicated=mode != "None" and variant.redundancy.get("placement") != "Host",
            eager=mode.startswith("Eager"),
            postpones="schedule" in variant.topology,
        )
        return lacks_memory(self.machine, of.size, of.model.samples, of.model.tokens, load)

    @property
    def _lacks_compiler(self) -> str:
        if self.quick:
            return "layers are not compiled with --quick"
        return f"torch.compile needs {self.machine.compiler}" if self.machine.compiler else ""

    def _lacks_devices(self, number: int) -> str:
        there = len(self.machine.devices)
        return f"there is one device of {number}" if self.machine.is_gpu and there < number else ""


def turned(sides: Sequence[_Side]) -> list[_Side]:
    """The sides of every second round: the second one before the first one, and the rest the other way round."""
    return [*sides[1::-1], *sides[:1:-1]]


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
