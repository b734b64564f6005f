"""Files of torch.profiler, as a worker writes them."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bamboo.bench.profiler_files import RecordingError, read_recordings

NAME = "w1.6.pt.trace.json.gz"


def write(folder: Path, events: list[dict[str, Any]]) -> None:
    document = {"schemaVersion": 1, "traceEvents": events, "baseTimeNanoseconds": 5000}
    (folder / NAME).write_bytes(gzip.compress(json.dumps(document).encode()))


def test_times_are_of_the_clock_that_all_processes_share(tmp_path: Path) -> None:
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#6", "pid": 9, "tid": 9, "ts": 1.0, "dur": 2.5}
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "pid": 2, "tid": 7, "ts": 2, "dur": 1, "args": {"device": 2}}
    write(tmp_path, [step, kernel, {"ph": "M", "name": "process_name", "pid": "Spans", "args": {"name": "python"}}])
    (found,) = read_recordings(tmp_path, gpu=True)
    assert (found.worker, found.step) == ("w1", (6000, 8500))
    assert [(one.device, one.begin, one.end) for one in found.activities] == [("cuda:2", 7000, 8000)]


def test_a_file_without_a_step_is_no_recording(tmp_path: Path) -> None:
    write(tmp_path, [])
    assert read_recordings(tmp_path, gpu=True) == []


@pytest.mark.parametrize("content", [b"", b"text", gzip.compress(b"{}"), gzip.compress(b"{}" * 100)[:20]])
def test_another_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(RecordingError, match=re.escape(NAME)):
        read_recordings(tmp_path, gpu=False)
