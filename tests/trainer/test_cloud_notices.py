"""What the clouds' metadata endpoints say, and which of them a worker is to watch."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from bamboo_core.names import EXIT_USAGE
from bamboo_trainer import __main__ as trainer_main
from bamboo_trainer.worker import cloud_notices
from bamboo_trainer.worker.cloud_notices import Answer, Cloud, CloudNotice, Unclear, Wanted, Withdrawn, news, wanted
from cloud_kit import (
    event,
)

NOW = datetime(2016, 9, 19, 18, 29, 0, tzinfo=UTC)


def ok(body: object) -> Answer:
    return Answer(status=200, body=body if isinstance(body, str) else json.dumps(body))


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ({"action": "terminate", "time": "2016-09-19T18:30:30Z"}, 90.0),
        ({"action": "stop", "time": "2016-09-19T18:30:30"}, 90.0),
        ({"action": "terminate", "time": "2016-09-19T19:30:00Z"}, 120.0),  # AWS gives two minutes; the clock is wrong
        ({"action": "terminate", "time": "2016-09-19T18:00:00Z"}, 5.0),
        ({"action": "hibernate", "time": "2016-09-19T18:30:30Z", "new": 1}, 5.0),
    ],
)
def test_aws_says_when(body: dict[str, str], seconds: float) -> None:
    notice = cloud_notices.aws_action(ok(body), NOW)
    assert notice
    assert (notice.source, notice.seconds) == ("AwsSpotInterruption", seconds)
    assert body["time"] in notice.message


def test_aws_recommends() -> None:
    notice = cloud_notices.aws_rebalance(ok({"noticeTime": "2016-09-19T18:22:00Z"}), NOW)
    assert notice
    assert (notice.source, notice.seconds) == ("AwsRebalanceRecommendation", 120.0)
    assert cloud_notices.aws_rebalance(Answer(status=404, body=""), NOW) is None
    assert cloud_notices.aws_action(Answer(status=404, body=""), NOW) is None


@pytest.mark.parametrize(
    ("read", "body", "seconds"),
    [
        (cloud_notices.gcp_preempted, "FALSE", None),
        (cloud_notices.gcp_preempted, "TRUE\n", 30.0),
        (cloud_notices.gcp_maintenance, "NONE", None),
        (cloud_notices.gcp_maintenance, "MIGRATE_ON_HOST_MAINTENANCE", None),
        (cloud_notices.gcp_maintenance, "TERMINATE_ON_HOST_MAINTENANCE", 60.0),
    ],
)
def test_gcp_says_whether(read: Callable[..., CloudNotice | None], body: str, seconds: float | None) -> None:
    notice = read(ok(body), NOW)
    assert (notice.seconds if notice else None) == seconds


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], None),
        ([event("Preempt")], ("AzurePreempt", 47.0)),
        ([event("Terminate", "other", "VMSS_3")], ("AzureTerminate", 47.0)),
        ([event("Reboot", NotBefore="")], ("AzureReboot", 900.0)),
        ([event("Redeploy", NotBefore="soon")], ("AzureRedeploy", 600.0)),
        ([event("Preempt", NotBefore="", EventStatus="Started")], ("AzurePreempt", 5.0)),
        ([event("Preempt", NotBefore="Mon, 19 Sep 2016 18:00:00 GMT")], ("AzurePreempt", 5.0)),
        ([event("Freeze")], None),
        ([event("Preempt", "vmss_4")], None),  # events are told to all nodes of a scale set
        ([event("Preempt", EventStatus="Completed")], None),
        ([event("Preempt", ResourceType="Disk")], None),
        ([event("Reboot", NotBefore="", EventId="a"), event("Preempt", EventId="b")], ("AzurePreempt", 47.0)),
    ],
)
def test_azure_says_when(found: list[Any], expected: tuple[str, float] | None) -> None:
    notice = cloud_notices.azure_events(ok({"DocumentIncarnation": 2, "Events": found}), "vmss_3", NOW)
    assert (notice and (notice.source, notice.seconds)) == expected


def test_azure_is_told_of_events_that_concern_one_node_only() -> None:
    found = [event(EventId="a"), event("Preempt", "vmss_3", "vmss_4", EventId="b")]
    found.append(event(EventId="c", EventStatus="Started"))
    notice = cloud_notices.azure_events(ok({"Events": found}), "vmss_3", NOW)
    assert notice
    assert notice.events == ("a",)
    assert json.loads(cloud_notices.azure_acknowledgement("a")) == {"StartRequests": [{"EventId": "a"}]}


@pytest.mark.parametrize("body", ["", "no json", "[]", "{}", '{"action":1}', '{"Events":[{}]}', "\x00", "null"])
@pytest.mark.parametrize(
    "read",
    [
        cloud_notices.aws_action,
        cloud_notices.aws_rebalance,
        cloud_notices.gcp_preempted,
        cloud_notices.gcp_maintenance,
        lambda answer, now: cloud_notices.azure_events(answer, "vmss_3", now),
    ],
)
def test_garbage_says_nothing(read: Callable[..., CloudNotice | None], body: str) -> None:
    for answer in (ok(body), Answer(status=503, body="FALSE")):
        with pytest.raises(Unclear):
            read(answer, NOW)


@pytest.mark.parametrize(
    "body",
    [{"action": "dance", "time": "2016-09-19T18:30:30Z"}, {"action": "stop", "time": "soon"}],
)
def test_unknown_words_say_nothing(body: object) -> None:
    with pytest.raises(Unclear):
        cloud_notices.aws_action(ok(body), NOW)


def test_a_notice_is_news_once_and_its_withdrawal_too() -> None:
    first = CloudNotice(source="S", said="a", message="m", seconds=30.0)
    same = CloudNotice(source="S", said="a", message="m", seconds=28.0)
    other = CloudNotice(source="S", said="b", message="m", seconds=5.0)
    assert [news(None, None), news(None, first), news(first, same)] == [None, first, None]
    assert [news(first, other), news(first, None)] == [other, Withdrawn(first)]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"BAMBOO_METADATA": ""}, None),
        ({"BAMBOO_METADATA": "off", "BAMBOO_METADATA_URL": "nonsense"}, None),
        ({"BAMBOO_METADATA": "auto"}, Wanted(cloud=None, url="http://169.254.169.254")),
        (
            {"BAMBOO_METADATA": "aws", "BAMBOO_METADATA_REBALANCE": "true", "BAMBOO_METADATA_URL": "http://h:1/"},
            Wanted(cloud=Cloud.AWS, url="http://h:1", rebalance=True),
        ),
        (
            {"BAMBOO_METADATA": "azure", "BAMBOO_METADATA_ACKNOWLEDGE": "true"},
            Wanted(cloud=Cloud.AZURE, acknowledge=True),
        ),
        ({"BAMBOO_METADATA": "gcp", "BAMBOO_METADATA_GCP_SECONDS": "120"}, Wanted(cloud=Cloud.GCP, gcp_seconds=120.0)),
    ],
)
def test_which_cloud_is_watched_follows_from_the_environment(
    environment: dict[str, str], expected: Wanted | None
) -> None:
    assert wanted(environment) == expected


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"BAMBOO_METADATA": "AWS"}, 'BAMBOO_METADATA: expected one of off, auto, aws, gcp, azure, got "AWS"'),
        ({"BAMBOO_METADATA": "gcp", "BAMBOO_METADATA_URL": "h"}, "BAMBOO_METADATA_URL: expected http://HOST"),
        ({"BAMBOO_METADATA": "aws", "BAMBOO_METADATA_REBALANCE": "1"}, "BAMBOO_METADATA_REBALANCE: expected true or"),
        (
            {"BAMBOO_METADATA": "gcp", "BAMBOO_METADATA_GCP_SECONDS": "2m"},
            'BAMBOO_METADATA_GCP_SECONDS: expected whole seconds, 5 to 3600, got "2m"',
        ),
    ],
)
def test_a_wrong_wish_ends_with_a_sentence(
    environment: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = {"BAMBOO_WORKER": "w", "BAMBOO_COORDINATOR": "ws://x", "BAMBOO_TOKEN_FILE": "/t"}
    for name, value in {**needed, **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["bamboo_trainer"])
    assert trainer_main.main() == EXIT_USAGE
    assert sentence in capsys.readouterr().err
