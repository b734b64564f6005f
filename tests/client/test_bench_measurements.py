"""What `bamboo bench` measures, in which order, and what it leaves out and why."""

from bamboo.bench.bench_measurements import (
    COMPILED,
    EAGER,
    CountWork,
    JobWork,
    PlainWork,
    list_measurements,
)
from bamboo.bench.report import BenchPart, MachineFound
from bamboo.bench.sizes import BenchSizes, choose_sizes
from bamboo_core.job.manifest import parse_manifest
from bench_kit import machine


def sizes(of: MachineFound, *, quick: bool = False) -> BenchSizes:
    found = choose_sizes(of, quick=quick)
    assert isinstance(found, BenchSizes)
    return found


def test_every_job_is_a_valid_manifest_and_every_key_is_another() -> None:
    for of, quick in ((machine(gpus=8), False), (machine(gpus=1), False), (machine(), False), (machine(), True)):
        found = list_measurements(of, sizes(of, quick=quick), tuple(BenchPart), rounds=2, quick=quick)
        assert len({one.key for one in found}) == len(found)
        for one in found:
            parse_manifest(dict(one.work.job))
        assert {one.part for one in found} == set(BenchPart) - {BenchPart.MACHINE}
        order = list(BenchPart)
        assert [order.index(one.part) for one in found] == sorted(order.index(one.part) for one in found)


def test_sides_take_turns_and_every_second_round_goes_the_other_way() -> None:
    of = machine(gpus=2)
    found = list_measurements(of, sizes(of), (BenchPart.THROUGHPUT,), rounds=2, quick=False)
    first, second = ([one.side for one in found if one.round == number] for number in (0, 1))
    assert first == [
        EAGER,
        COMPILED,
        "1 worker",
        "2 workers",
        "2 workers, zero bubble",
        "2 workers, compiled",
        "1 worker with 2 devices",
        "2 pipelines of one stage",
        "2 workers, zero bubble, compiled",
        "2 workers, fp32",
    ]
    assert second == [COMPILED, EAGER, *first[:1:-1]], "or a round would have ratios after its last side only"
    devices = [one.work.devices for one in found if isinstance(one.work, JobWork) and one.round == 0]
    assert devices == [1, 2, 2, 2, 2, 2, 2, 2]


def test_what_cannot_be_measured_is_listed_once_with_its_reason() -> None:
    of = machine(gpus=1, compiler="a C++ compiler")
    found = list_measurements(of, sizes(of), tuple(BenchPart), rounds=3, quick=False)
    lacking = {(one.part, one.side): one.lacks for one in found if one.lacks}
    assert lacking == {
        (BenchPart.CHECKS, "two devices a worker"): "there is one device of 2",
        (BenchPart.CHECKS, "compiled layers"): "torch.compile needs a C++ compiler",
        (BenchPart.THROUGHPUT, COMPILED): "torch.compile needs a C++ compiler",
        (BenchPart.THROUGHPUT, "2 workers, compiled"): "torch.compile needs a C++ compiler",
        (BenchPart.THROUGHPUT, "2 workers, zero bubble, compiled"): "torch.compile needs a C++ compiler",
        (BenchPart.THROUGHPUT, "2 pipelines of one stage"): "it takes about 102 GB of a device, which has 80",
        (BenchPart.LARGER, "a larger model"): "Llama 3 8B: it takes about 196 GB of a device, which has 80",
        (BenchPart.PRICES, "EagerForward"): "it takes about 80 GB of a device, which has 80",
        (BenchPart.PRICES, "EagerBackward"): "it takes about 80 GB of a device, which has 80",
        (BenchPart.MEMORY, "EagerForward"): "it takes about 80 GB of a device, which has 80",
    }
    assert sum(one.side == COMPILED for one in found) == 1
    assert sum(isinstance(one.work, PlainWork) and one.side == EAGER for one in found) == 1 + 3


def test_operations_of_a_model_that_fits_into_no_device_are_counted_for_the_others() -> None:
    of = machine(gpus=8)
    found = list_measurements(of, sizes(of), (BenchPart.LARGER,), rounds=2, quick=False)
    counted = [one for one in found if one.side == EAGER]
    assert [type(one.work) for one in counted] == [CountWork]
    assert counted[0].lacks == ""
    lacking = [one for one in found if one.lacks]
    assert [(one.side, one.lacks) for one in lacking] == [
        (COMPILED, "it takes about 167 GB of a device, which has 80"),
    ]
