"""Rules between fields of a manifest."""

from manifest_case_kit import changed
from manifest_kit import problems


def test_pipelines_may_not_exceed_the_elastic_maximum() -> None:
    document = changed({"spec.topology.pipelines": 3, "spec.elastic": {"minPipelines": 1, "maxPipelines": 2}})
    assert problems(document) == ["spec.elastic.maxPipelines: expected at least spec.topology.pipelines (3), got 2"]


def test_a_rule_is_silent_where_its_field_is_wrong() -> None:
    assert problems(changed({"spec.training.microBatchSize": "x"})) == [
        'spec.training.microBatchSize: expected an integer >= 1, got "x"'
    ]
