"""One bit flips at each kind of place: does the guard find it, and is it undone?

    python tests/simulation/flip_bits.py                                three flips at each place
    python tests/simulation/flip_bits.py --mode EagerForward --flips 10 --seed 1
    python tests/simulation/flip_bits.py --place "optimizer state" --each       with a line for each flip

Each flip is a job of its own: the real coordinator, engines and replicas in this process, over a network in memory,
with a small model. A bit of a mantissa flips (the lowest as likely as the highest) in a random number, step and
microbatch, on the worker that runs the stage (owner) or on the one that holds its copy (replica).

    flips   that were made; with some places nothing is computed there: `-`
    found   states or results were found to differ
    undone  the job ended with the bits of one in which nothing happened
    silent  not found, and the weights are other ones
"""

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bamboo_core.control.digests import add_digests
from bamboo_core.coordinator.events import Outcome
from flipped_job import Flip, FlippedJob, Place, drawn
from training_job import Job

STEPS, MICROBATCHES = 8, 4
STRUCK = range(3, 7)  # steps in which a bit flips: not so early that the task is to blame


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was seen of one flip."""

    struck: bool  # was anything computed there, so that it could flip?
    found: bool
    undone: bool
    ended: str

    @property
    def silent(self) -> bool:
        return self.struck and not self.found and not self.undone


def manifest(mode: str, stages: int) -> dict[str, Any]:
    config = {"width": 16, "blocks": max(2, stages - 1), "samples": 32}
    spec: dict[str, Any] = {
        "task": {"entrypoint": "bamboo_trainer.models.mlp:build", "config": config},
        "training": {"steps": STEPS, "globalBatchSize": 2 * MICROBATCHES, "microBatchSize": 2},
        "topology": {"stages": stages},
        "redundancy": {"mode": mode},
        "standby": {"workers": 1},
        "checkpoint": {"storage": {"uri": "memory://x"}, "everySteps": 2},
    }
    return {"apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "metadata": {"name": "bits"}, "spec": spec}


def digest_of(job: Job) -> str:
    return add_digests(job.digests) if job.finish and job.finish.outcome is Outcome.COMPLETE else ""


def seen(document: dict[str, Any], flip: Flip, undisturbed: str) -> Seen:
    job = FlippedJob(document, flip)
    job.run()
    assert job.finish is not None
    told = [emit.reason for emit in job.emitted if emit.warning]
    return Seen(
        struck=bool(job.flipped),
        found=bool(job.state.guard.differences),
        undone=digest_of(job) == undisturbed,
        ended=f"{job.finish.outcome} {job.finish.reason} {told}",
    )


def places(stages: int, only: str | None) -> Iterator[tuple[Place, int, bool]]:
    for place in Place:
        for stage in range(stages):
            for owner in (True, False):
                if only in (None, place) and Flip(place=place, stage=stage, owner=owner, step=0).possible(stages):
                    yield place, stage, owner


def main(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # the model is small
    document = manifest(arguments.mode, arguments.stages)
    undisturbed = digest_of(Job(manifest("None", arguments.stages)).run())
    assert undisturbed, "the undisturbed job did not complete"
    print(f"{arguments.mode}, {arguments.stages} stages, seed {arguments.seed}\n")
    print(f"| {'place':34} | stage | worker  | flips | found | undone | silent |")
    print(f"| {'-' * 34} | ----: | ------- | ----: | ----: | -----: | -----: |")
    rng, totals = random.Random(arguments.seed), [0] * 4
    for place, stage, owner in places(arguments.stages, arguments.place):
        results = []
        for _ in range(arguments.flips):
            flip = drawn(place, stage, owner, STRUCK, MICROBATCHES, rng)
            result = seen(document, flip, undisturbed)
            results += [result] if result.struck else []
            if arguments.each:
                print(f"  {flip}\n    {result}", file=sys.stderr)
        counts = [
            len(results),
            sum(r.found for r in results),
            sum(r.undone for r in results),
            sum(r.silent for r in results),
        ]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        told = [str(count) if counts[0] else "-" for count in counts]
        row = f"{told[0]:>5} | {told[1]:>5} | {told[2]:>6} | {told[3]:>6}"
        print(f"| {place:34} | {stage:>5} | {'owner' if owner else 'replica':7} | {row} |", flush=True)
    row = f"{totals[0]:>5} | {totals[1]:>5} | {totals[2]:>6} | {totals[3]:>6}"
    print(f"| {'all':34} | {'':>5} | {'':7} | {row} |")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="LazyForward", choices=["LazyForward", "EagerForward", "EagerBackward"])
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--flips", type=int, default=3, help="at each place")
    parser.add_argument("--place", choices=[place.value for place in Place], help="only there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", action="store_true", help="tell of each flip, on standard error")
    sys.exit(main(parser.parse_args()))
