"""What a worker says of itself that decides its bits."""

from collections.abc import Mapping

import pytest
import torch

from bamboo.control.codec import decode_from_worker, encode
from bamboo.control.protocol import Hello
from bamboo.names import DATA_PLANE_VERSION, NUMERICS_VERSION
from bamboo_trainer.worker.platform import processor, this_platform

XEON = {"processor": "0", "vendor_id": "GenuineIntel", "cpu family": "6", "model": "143", "cpu MHz": "2400.1"}
GRAVITON = {"processor": "0", "BogoMIPS": "243.75", "CPU implementer": "0x41", "CPU part": "0xd40"}


def test_it_says_what_torch_is_and_where_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAMBOO_DEVICE", "cpu")
    found = this_platform("job-w0")
    assert (found.torch, found.cuda) == (torch.__version__, "")
    assert (found.data_plane, found.numerics) == (DATA_PLANE_VERSION, NUMERICS_VERSION)
    assert found.device.endswith(torch.backends.cpu.get_cpu_capability())
    assert found == this_platform("job-w1")
    hello = Hello(worker="w", host="h", port=1, platform=found)
    assert decode_from_worker(encode(hello)) == hello


def test_a_device_that_is_not_there_is_for_others_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAMBOO_DEVICE", "cuda:99")
    assert this_platform("job-w0").device


@pytest.mark.parametrize(
    ("info", "machine", "begins"),
    [(XEON, "x86_64", "x86_64 GenuineIntel 6 143 "), (GRAVITON, "aarch64", "aarch64 0x41 0xd40 "), ({}, "s390x", "s")],
)
def test_processors_of_one_kind_are_equal_whatever_their_clock_rate(
    info: Mapping[str, str], machine: str, begins: str
) -> None:
    said = processor(info, machine)
    assert said.startswith(begins)
    assert said == processor({**info, "cpu MHz": "3100.0", "microcode": "0x2b0005c0"}, machine)
