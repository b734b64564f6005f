"""From which checkpoint a job goes on, and which ones are removed."""

import yaml

from bamboo.job.edits import numbers_digest
from bamboo.job.manifest import parse_manifest
from manifest_kit import WHOLE


def test_a_checkpoint_belongs_to_whatever_has_the_same_numbers():
    document = yaml.safe_load(WHOLE)
    digest = numbers_digest(parse_manifest(document))
    spec = document["spec"]

    def changed(section, **values):
        return numbers_digest(parse_manifest({**document, "spec": {**spec, section: {**spec[section], **values}}}))

    assert changed("topology", pipelines=1, lookahead=1) == changed("training", steps=200) == digest
    assert changed("training", nonFinite="Fail", maxConsecutiveSkips=7, evaluation={"everySteps": 3}) == digest
    assert changed("training", deterministic=False) == digest
    scaled = {"initialPower": 16, "growthInterval": 2000}
    assert changed("training", lossScale=scaled) == changed("training", lossScale=None)
    assert changed("training", gradientGroups=None) == digest  # as many as there are by default
    others = [
        changed("task", config={"rate": 0.5}),
        changed("task", entrypoint="other:build"),
        changed("training", seed=8),
        changed("training", precision="fp32", lossScale=None),
        changed("training", lossScale={"initialPower": 11, "growthInterval": 500}),
        changed("training", lossScale=None),
        changed("training", precision="bf16", lossScale=None),
        changed("training", precision="bf16", parameterPrecision="bf16", lossScale=None),
        changed("training", maxGradientNorm=2),
        changed("training", globalBatchSize=512),
        changed("training", microBatchSize=4),
        changed("training", gradientGroups=8),
        changed("training", reproducible=False, gradientGroups=None),
    ]
    assert len({digest, *others}) == len(others) + 1
