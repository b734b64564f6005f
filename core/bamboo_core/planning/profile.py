"""What a simulated run is made of: a model's layers on one kind of machine, and that machine's surroundings.

A profile is a JSON file, written by `bamboo profile` or by hand; docs/simulator.md describes it. Every group of numbers
says where it comes from. Times are seconds, sizes bytes, bandwidths bytes a second.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final, TypeVar

import msgspec

from bamboo_core.names import FLOWS_PER_LINK, LARGE_BODY

T = TypeVar("T")
FORMAT: Final = "bamboo-profile"
VERSION: Final = 1
MOST_LAYERS: Final = 10_000
# Of every profile: what must have a source.
SOURCES: Final = ("layers.seconds", "layers.update", "layers.bytes", "network", "storage", "times", "memory")

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
Whole = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
Usd = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class ProfileError(ValueError):
    """One sentence about what is wrong with a profile, with its file."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Base of a profile's parts."""


class Layer(_Part, frozen=True, kw_only=True):
    """One layer of the model, in the order in which the task has them."""

    # forward, backward: of one microbatch
    forward: Seconds
    backward: Seconds
    update: Seconds = 0.0  # of the optimizer's step
    parameters: Bytes  # what the layer holds, buffers included
    optimizer: Bytes  # what the optimizer remembers of it
    gradients: Bytes  # of the parameters that are trained
    activations: Bytes = 0  # what is kept of a microbatch from its forward to its backward
    # what the layer gives to the next one, of a microbatch; the gradient that comes back has the same size
    boundary: Bytes
    # what the first worker counts, by which the coordinator splits the layers at the start; 0 in all layers if that is
    # not known
    cost: Annotated[float, msgspec.Meta(ge=0, le=1e24)] = 0.0
    name: Name = ""


class Network(_Part, frozen=True, kw_only=True):
    """The network between two machines, in bytes a second."""

    flow: Rate  # of one connection
    machine: Rate  # of all that a machine sends, and of all that it receives
    latency: Seconds = 0.0  # until the first byte of a message has arrived

    def link(self, size: float) -> float:
        """Bytes a second of a frame of that size between two workers."""
        return min(self.machine, FLOWS_PER_LINK * self.flow) if size >= LARGE_BODY else self.flow


class Storage(_Part, frozen=True, kw_only=True):
    """The store of checkpoints, as one machine sees it."""

    write: Rate
    read: Rate
    latency: Seconds = 0.0  # of opening or closing a file


class Times(_Part, frozen=True, kw_only=True):
    """What else than layers takes time, in seconds."""

    start: Seconds  # from the moment that a machine is there, and billed, until its worker is ready
    detection: Seconds  # from the loss of a machine without notice until the coordinator knows
    rendezvous: Seconds = 0.0  # until all workers of a job that is restarted have found each other
    # the same while the job's processes go on. Bamboo has neither of these two: they are what other systems take
    regroup: Seconds = 0.0
    instruction: Seconds = 0.0  # what the engine adds to each forward and each backward
    commit: Seconds = 0.0  # what the engine adds to each step


class ModelFigures(_Part, frozen=True, kw_only=True):
    """What decides how long a step takes, and what memory."""

    layers: tuple[Layer, ...]  # for the job's microbatches
    network: Network
    # instruction, commit: as in `Times`
    instruction: Seconds = 0.0
    commit: Seconds = 0.0

    @property
    def costs(self) -> tuple[float, ...]:
        """The cost of each layer, by which the coordinator splits the layers: as counted, else seconds of a
        microbatch.
        """
        counted = any(layer.cost for layer in self.layers)
        return tuple(layer.cost if counted else layer.forward + layer.backward for layer in self.layers)


class Machine(_Part, frozen=True, kw_only=True):
    """The memory of a machine, in bytes."""

    memory: Bytes  # of the device that computes; the same as host_memory where that is the processor
    host_memory: Bytes = 0


class Prices(_Part, frozen=True, kw_only=True):
    """USD for a machine and hour."""

    spot: Usd
    on_demand: Usd


class Published(_Part, frozen=True, kw_only=True):
    """What was published of a model on this machine."""

    batch: Whole  # samples of a step
    # stages, pipelines: the grid on spot machines
    stages: Whole
    pipelines: Whole
    # on_demand_stages, on_demand_pipelines, on_demand_seconds: the grid on on-demand machines, and a step on it
    on_demand_stages: Whole
    on_demand_pipelines: Whole
    on_demand_seconds: Seconds
    step_seconds: dict[str, Seconds]  # on spot machines, by the number of pipelines
    steps: Whole | None = None  # of a whole run, if that is known


class ProfiledTask(_Part, frozen=True, kw_only=True):
    """What was measured: fields of the manifest under `task` and `training`."""

    entrypoint: Name
    config: dict[str, Any] = {}
    precision: Name = "fp32"
    parameter_precision: Name = "fp32"
    boundary_precision: Name = "fp32"


class Source(_Part, frozen=True, kw_only=True):
    """The source of numbers."""

    text: Text
    estimated: bool = False  # nobody has measured them; the text says how they were derived


class ModelProfile(_Part, frozen=True, kw_only=True):
    """A model as it was measured on a machine. Use `parse_profile`, which checks it."""

    format: str = FORMAT
    version: int = VERSION
    name: Name  # of the model and the machine
    device: Name
    samples: Whole  # of a microbatch, for which the layers' seconds, activations and boundaries are
    layers: Annotated[tuple[Layer, ...], msgspec.Meta(min_length=1, max_length=MOST_LAYERS)]
    network: Network
    storage: Storage
    times: Times
    machine: Machine
    sources: dict[Name, Source]  # by what they are the source of: SOURCES, and prices and published if there are any
    prices: Prices | None = None
    published: Published | None = None
    task: ProfiledTask | None = None  # None if it is not said of which one it is

    @property
    def figures(self) -> ModelFigures:
        added = self.times
        return ModelFigures(
            layers=self.layers,
            network=self.network,
            instruction=added.instruction,
            commit=added.commit,
        )

    @property
    def costs(self) -> tuple[float, ...]:
        """The cost of each layer; see `ModelFigures.costs`."""
        return self.figures.costs

    @property
    def state_bytes(self) -> int:
        """The bytes of the whole model with what the optimizer remembers, as a checkpoint has it."""
        return sum(layer.parameters + layer.optimizer for layer in self.layers)

    @property
    def estimated(self) -> tuple[str, ...]:
        """What nobody has measured."""
        return tuple(name for name, source in self.sources.items() if source.estimated)


_DECODER = msgspec.json.Decoder(ModelProfile, strict=True)


def parse_profile(path: str, text: bytes | str) -> ModelProfile:
    """The profile in a text. path: for messages. Raises ProfileError naming it, and what was expected where."""
    try:
        profile = _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProfileError(f"{path}: not a profile: {_lower(str(error))}") from None
    except UnicodeDecodeError:
        raise ProfileError(f"{path}: not a profile: it is not UTF-8 text") from None
    for problem in _problems(profile):
        raise ProfileError(f"{path}: {problem}")
    return profile


def to_json(profile: ModelProfile) -> bytes:
    """The file's content, a line for each layer."""
    lines = msgspec.json.format(msgspec.json.encode(profile), indent=2)
    return lines + b"\n"


def for_microbatch(profile: ModelProfile, samples: int) -> ModelProfile:
    """The profile for microbatches of another size: seconds, activations and boundaries grow in proportion.

    That is an estimate, since small microbatches use a device less well, and its source says so.
    """
    if samples == profile.samples:
        return profile
    by = samples / profile.samples
    replace = msgspec.structs.replace
    layers = tuple(
        replace(
            layer,
            forward=layer.forward * by,
            backward=layer.backward * by,
            activations=round(layer.activations * by),
            boundary=round(layer.boundary * by),
        )
        for layer in profile.layers
    )
    told = f"{profile.sources['layers.seconds'].text}; in proportion, from microbatches of {profile.samples} samples"
    sources = {**profile.sources, "layers.seconds": Source(text=told[:2000], estimated=True)}
    return replace(profile, samples=samples, layers=layers, sources=sources)


def _problems(profile: ModelProfile) -> Iterator[str]:
    if profile.format != FORMAT or profile.version != VERSION:
        found = f"{profile.format!r} version {profile.version}"[:60]
        yield f"expected format {FORMAT!r} version {VERSION}; found {found}"
    wanted = [*SOURCES, *(name for name in ("prices", "published") if getattr(profile, name) is not None)]
    for name in wanted:
        if name not in profile.sources:
            yield f"sources: expected one for {name}; every number needs to say where it comes from"
    for name in profile.sources:
        if name not in wanted:
            yield f"sources: {name[:60]!r} is not one of {', '.join(wanted)}"
    if not any(layer.forward + layer.backward for layer in profile.layers):
        yield "layers: at least one of them must take time"
    if profile.network.machine < profile.network.flow:
        yield "network.machine: must be at least network.flow, since one connection cannot carry more than all"
    for key in profile.published.step_seconds if profile.published else ():
        if not key.isdecimal() or not 0 < int(key) < 10_000:
            yield f"published.stepSeconds: its keys must be numbers of pipelines, not {key[:20]!r}"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
