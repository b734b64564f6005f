"""Edits that a running job follows, and the digest of all fields on which the trained weights depend."""

from typing import Any

import pytest
import yaml

from bamboo_core.job.edits import (
    apply_edit_to_manifest,
    numbers_digest,
    refused_fields,
)
from bamboo_core.job.manifest import parse_manifest
from manifest_kit import WHOLE, minimal


def test_a_checkpoint_belongs_to_whatever_has_the_same_numbers():
    document = yaml.safe_load(WHOLE)
    digest = numbers_digest(parse_manifest(document))
    spec = document["spec"]

    def changed(section, **values):
        return numbers_digest(parse_manifest({**document, "spec": {**spec, section: {**spec[section], **values}}}))

    assert (
        changed("topology", schedule="1F1B")
        == changed("elastic", maxWorkers=8)
        == changed("training", steps=200)
        == digest
    )
    assert changed("training", nonFinite="Fail", evaluation={"everySteps": 3}) == digest
    assert changed("training", deterministic=False) == changed("training", compile=False) == digest
    assert changed("training", gradientGroups=None) == changed("training", gradientGroups=32)  # the default
    others = [
        changed("task", config={"rate": 0.5}),
        changed("task", entrypoint="other:build"),
        changed("training", seed=8),
        changed("training", precision="fp32"),
        changed("training", precision="bf16"),
        changed("training", precision="bf16", parameterPrecision="bf16"),
        changed("training", precision="bf16", boundaryPrecision="bf16"),
        changed("training", maxGradientNorm=2),
        changed("training", globalBatchSize=512),
        changed("training", microBatchSize=4),
        changed("training", gradientGroups=8),
    ]
    assert len({digest, *others}) == len(others) + 1


ALL_BF16 = dict.fromkeys(("precision", "parameterPrecision", "boundaryPrecision"), "bf16")


@pytest.mark.parametrize(
    ("training", "digest"),
    [
        ({}, "a100a65e90c9a47c936cf330a728abfaf2d967d62bc9c48fd389e6ddb7412dbb"),
        (ALL_BF16, "8bd4b8054961b8336c7e33519658cc2cf3fc79b6df39b5129936c3ad3726e842"),
    ],
)
def test_checkpoints_that_are_there_keep_their_digest(training: dict[str, Any], digest: str) -> None:
    """A job finds its checkpoints by this digest, so a change of the spec's Python types must not change it."""
    document = minimal()
    document["spec"]["training"] |= training
    assert numbers_digest(parse_manifest(document)) == digest


OLD = minimal()


def edited(**spec: Any) -> dict[str, Any]:
    return {**OLD, "spec": {**OLD["spec"], **spec}}


@pytest.mark.parametrize(
    ("edit", "refused"),
    [
        ({"topology": {**OLD["spec"]["topology"], "schedule": "ZBH1"}, "redundancy": {"replicas": 2}}, ()),
        ({"worker": {"image": "b", "devices": 2}}, ("spec.worker.devices",)),
        (
            {"training": {**OLD["spec"]["training"], "seed": 9, "steps": 11}},
            ("spec.training.steps", "spec.training.seed"),
        ),
    ],
)
def test_a_running_job_takes_over_what_changes_no_numbers_and_names_the_rest(
    edit: dict[str, Any], refused: tuple[str, ...]
) -> None:
    wanted = parse_manifest(edited(**edit))
    followed = parse_manifest(apply_edit_to_manifest(OLD, edited(**edit)))
    assert set(refused_fields(followed, wanted)) == set(refused)
    assert (followed == wanted) == (not refused)


@pytest.mark.parametrize("stages", [1, 4])
def test_a_number_of_stages_for_stages_that_are_chosen_is_refused_by_its_name(stages: int) -> None:
    """`refused_fields` names spec.topology.stages if an edit sets or removes a fixed number of stages."""
    chosen, fixed = (edited(topology=topology, elastic={"maxWorkers": 8}) for topology in ({}, {"stages": stages}))
    for old, new in ((chosen, fixed), (fixed, chosen)):
        followed = parse_manifest(apply_edit_to_manifest(old, new))
        assert refused_fields(followed, parse_manifest(new)) == ("spec.topology.stages",)
