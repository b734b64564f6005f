"""Profiles, the input of simulations: figures of a model's layers on one kind of machine, its network and storage.

A profile is a JSON file, written by `bamboo profile` or by hand; docs/simulator.md describes it. Every group of numbers
names its source. Times are seconds, sizes bytes, bandwidths bytes per second.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec

from bamboo_core.checkpoint.layout import MOST_LAYERS
from bamboo_core.names import FLOWS_PER_LINK, LARGE_BODY

Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class LayerBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of a layer and the size of its output, in bytes."""

    parameters: Bytes  # with buffers
    optimizer: Bytes  # optimizer state
    gradients: Bytes  # of trained parameters
    activations: Bytes  # kept for a microbatch from its forward to its backward
    boundary: Bytes  # a microbatch's output for the next layer


FORMAT: Final = "bamboo-profile"
VERSION: Final = 1
# the groups of numbers that need a source in every profile
SOURCES: Final = ("layers.seconds", "layers.update", "layers.bytes", "network", "storage", "times", "memory")

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
Whole = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
Pipelines = Annotated[str, msgspec.Meta(pattern="^[1-9][0-9]{0,3}$")]
Usd = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class ProfileError(ValueError):
    """Error because a profile is missing, invalid or unsuitable; its message is one sentence for the user."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Base class of a profile's parts: camelCase keys; unknown keys are refused."""


class Layer(_Part, frozen=True, kw_only=True):
    """A layer of the model: its times in seconds and its sizes in bytes."""

    # forward, backward: of one microbatch
    forward: Seconds
    backward: Seconds
    update: Seconds = 0.0  # of the optimizer's step
    parameters: Bytes  # of the layer, buffers included
    optimizer: Bytes  # the optimizer's state for it
    gradients: Bytes  # of the parameters that are trained
    activations: Bytes = 0  # kept for a microbatch from its forward to its backward
    # the layer's output for one microbatch; the gradient that comes back has the same size
    boundary: Bytes
    # the first worker's estimate, by which the coordinator initially splits the layers; 0 in all layers if unknown
    cost: Annotated[float, msgspec.Meta(ge=0, le=1e24)] = 0.0
    name: Name = ""


class Network(_Part, frozen=True, kw_only=True):
    """The network between two machines: bandwidths in bytes per second, latency in seconds."""

    flow: Rate  # of one connection
    machine: Rate  # of all that a machine sends, and of all that it receives
    latency: Seconds = 0.0  # until the first byte of a message has arrived

    def link(self, size: float) -> float:
        """Return the bandwidth between two workers, in bytes per second, for frames of `size` bytes. It assumes that
        large frames travel FLOWS_PER_LINK at a time; a large frame that travels alone takes longer.
        """
        return min(self.machine, FLOWS_PER_LINK * self.flow) if size >= LARGE_BODY else self.flow


class Storage(_Part, frozen=True, kw_only=True):
    """The store of checkpoints, as one machine sees it: bandwidths in bytes per second, latency in seconds."""

    write: Rate
    read: Rate
    latency: Seconds = 0.0  # of opening or closing a file


class Times(_Part, frozen=True, kw_only=True):
    """Durations, in seconds, of everything apart from layers, the network and the storage."""

    start: Seconds  # from the moment a machine runs, and is billed, until its worker is ready
    detection: Seconds  # from the loss of a machine without notice until the coordinator knows
    rendezvous: Seconds = 0.0  # until all workers of a restarted job have connected to each other
    # the same while the job's processes keep running. Bamboo has neither: other systems need these two
    regroup: Seconds = 0.0
    instruction: Seconds = 0.0  # the engine's overhead for each forward and each backward
    commit: Seconds = 0.0  # the engine's overhead for each step


class ModelFigures(_Part, frozen=True, kw_only=True):
    """The figures that determine a step's time and memory."""

    layers: tuple[Layer, ...]  # for the job's microbatches
    network: Network
    # instruction, commit: as in `Times`
    instruction: Seconds = 0.0
    commit: Seconds = 0.0

    @property
    def costs(self) -> tuple[float, ...]:
        """The cost of each layer, by which the coordinator splits the layers: `Layer.cost` if any layer has one, else
        the seconds of a microbatch's forward and backward.
        """
        counted = any(layer.cost for layer in self.layers)
        return tuple(layer.cost if counted else layer.forward + layer.backward for layer in self.layers)


class Machine(_Part, frozen=True, kw_only=True):
    """The memory of a machine, in bytes."""

    memory: Bytes  # of the computing device; equal to host_memory if that is the CPU
    host_memory: Bytes = 0


class Prices(_Part, frozen=True, kw_only=True):
    """The prices of a machine, in USD per hour."""

    spot: Usd
    on_demand: Usd


class Published(_Part, frozen=True, kw_only=True):
    """Published figures of the model on this machine: grids and step times."""

    batch: Whole  # samples per step
    # stages, pipelines: the grid on spot machines
    stages: Whole
    pipelines: Whole
    # on_demand_stages, on_demand_pipelines, on_demand_seconds: the grid on on-demand machines, and a step on it
    on_demand_stages: Whole
    on_demand_pipelines: Whole
    on_demand_seconds: Seconds
    step_seconds: dict[Pipelines, Seconds]  # on spot machines, by the number of pipelines
    steps: Whole | None = None  # of a whole run, if known


class ProfiledTask(_Part, frozen=True, kw_only=True):
    """The measured task: fields of the manifest under `task` and `training`."""

    entrypoint: Name
    config: dict[str, Any] = {}
    precision: Name = "fp32"
    parameter_precision: Name = "fp32"
    boundary_precision: Name = "fp32"


class Source(_Part, frozen=True, kw_only=True):
    """The origin of a group of numbers."""

    text: Text
    estimated: bool = False  # not measured; the text says how they were derived


class ModelProfile(_Part, frozen=True, kw_only=True):
    """A model measured on a machine. Use `parse_profile`, which checks it."""

    format: str = FORMAT
    version: int = VERSION
    name: Name  # of the model and the machine
    device: Name
    samples: Whole  # per microbatch, for the layers' seconds, activations and boundaries
    layers: Annotated[tuple[Layer, ...], msgspec.Meta(min_length=1, max_length=MOST_LAYERS)]
    network: Network
    storage: Storage
    times: Times
    machine: Machine
    sources: dict[Name, Source]  # by group of numbers: SOURCES, and prices and published if present
    prices: Prices | None = None
    published: Published | None = None
    task: ProfiledTask | None = None  # None if unknown

    @property
    def figures(self) -> ModelFigures:
        times = self.times
        return ModelFigures(
            layers=self.layers, network=self.network, instruction=times.instruction, commit=times.commit
        )

    @property
    def costs(self) -> tuple[float, ...]:
        """The cost of each layer; see `ModelFigures.costs`."""
        return self.figures.costs

    @property
    def state_bytes(self) -> int:
        """The size of the model and the optimizer's state in a checkpoint, in bytes."""
        return sum(layer.parameters + layer.optimizer for layer in self.layers)

    @property
    def estimated(self) -> tuple[str, ...]:
        """The groups of numbers that were not measured."""
        return tuple(name for name, source in self.sources.items() if source.estimated)


_DECODER = msgspec.json.Decoder(ModelProfile, strict=True)


def parse_profile(path: str, text: bytes | str) -> ModelProfile:
    """Parse and check a profile. path: for messages. Raises ProfileError with the path and the first problem."""
    try:
        profile = _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        message = str(error)
        raise ProfileError(f"{path}: not a profile: {message[:1].lower()}{message[1:]}") from None
    for problem in _problems(profile):
        raise ProfileError(f"{path}: {problem}")
    return profile


def to_json(profile: ModelProfile) -> bytes:
    """Return a profile as the content of its JSON file, indented."""
    lines = msgspec.json.format(msgspec.json.encode(profile), indent=2)
    return lines + b"\n"


def for_microbatch(profile: ModelProfile, samples: int) -> ModelProfile:
    """Return the profile for another microbatch size. Seconds, activations and boundaries scale in proportion, which is
    an estimate, since small microbatches use a device less well; the source of the layers' seconds says so. samples:
    per microbatch.
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
    text = f"{profile.sources['layers.seconds'].text}; in proportion, from microbatches of {profile.samples} samples"
    sources = {**profile.sources, "layers.seconds": Source(text=text[:2000], estimated=True)}
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
