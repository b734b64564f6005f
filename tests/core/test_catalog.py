"""The catalog of all metrics: names, help texts and labels."""

import re

from bamboo_core.metrics.catalog import EVERY_METRIC


def test_names_follow_the_conventions_and_say_whose_they_are() -> None:
    names = [metric.name for metric in EVERY_METRIC]
    assert len(names) == len(set(names))
    for metric in EVERY_METRIC:
        assert re.fullmatch(r"bamboo_(operator|job|worker)_[a-z_]+", metric.name)
        assert not (metric.name.endswith("_total") and metric.buckets), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith("."), metric.name
        ours = metric.labels[:2] == ("namespace", "job")
        assert ours is metric.name.startswith("bamboo_job_"), metric.name
        assert not {"le", "quantile", "instance", "pod"} & set(metric.labels), metric.name
