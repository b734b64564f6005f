"""The files that torch.profiler writes in a job's workers (`spec.training.profiler`), read for `bamboo bench`."""

import gzip
import zlib
from pathlib import Path
from typing import Final

import msgspec

from bamboo.bench.device_times import ProfiledEvent, RecordedStep, recording_of
from bamboo_core.complaints import system_reason

ENDING: Final = ".pt.trace.json.gz"


class RecordingError(ValueError):
    """A file cannot be read; one sentence."""


class _WrittenEvent(msgspec.Struct, frozen=True, gc=False):
    """An event of Chrome's trace format. ts, dur: microseconds after the file's base time."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0


class _ProfilerFile(msgspec.Struct, frozen=True):
    events: list[_WrittenEvent] = msgspec.field(name="traceEvents")
    base: int = msgspec.field(name="baseTimeNanoseconds", default=0)


def read_recordings(folder: Path, *, gpu: bool) -> list[RecordedStep]:
    """The recorded steps, one of each file in which there is one. gpu: as of `recording_of`. Raises RecordingError."""
    found = (_read(path, gpu=gpu) for path in sorted(folder.glob(f"*{ENDING}")))
    return [one for one in found if one is not None]


def _read(path: Path, *, gpu: bool) -> RecordedStep | None:
    try:
        file = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=_ProfilerFile, strict=False)
    except OSError as error:
        raise RecordingError(f"{path.name}: {system_reason(error)}") from None
    except (EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path.name} is not what torch.profiler writes: {error}") from None
    events = [_event(one, file.base) for one in file.events if one.ph == "X"]
    worker = path.name.removesuffix(ENDING).rpartition(".")[0]
    return recording_of(worker, events, gpu=gpu)


def _event(event: _WrittenEvent, base: int) -> ProfiledEvent:
    begin = base + round(1e3 * event.ts)
    return ProfiledEvent(event.cat, event.name, event.pid, begin, begin + round(1e3 * event.dur))
