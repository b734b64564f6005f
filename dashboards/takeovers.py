"""What was taken away, and what it cost to go on."""

from grafana_foundation_sdk.models.dashboard import Dashboard
from parts import SOME_JOBS as J
from parts import Query, build, graph, increase, number, warm

NAME = "{{namespace}}/{{job}}"


def make() -> Dashboard:
    return build(
        "bamboo-takeovers",
        "Bamboo / Takeovers",
        "Preemptions by source, takeovers and their pauses, and what had to be repeated.",
        [
            ("In this time", _sums()),
            ("Preemptions", _preemptions()),
            ("Takeovers", _takeovers()),
            ("After it", _after()),
        ],
    )


def _pause(quantile: float, by: str = "") -> str:
    return (
        f"histogram_quantile({quantile}, sum by (le{by}) "
        f"(increase(bamboo_job_takeover_pause_seconds_bucket{{{J}}}[$__range])))"
    )


def _sums() -> list[object]:
    count = f"bamboo_job_takeover_pause_seconds_count{{{J}"
    return [
        number(
            "Preemptions",
            "Workers lost or given notice.",
            "none",
            increase(f"bamboo_job_preemptions_total{{{J}}}", "$__range"),
        ),
        number(
            "Takeovers without notice",
            "In the middle of a step.",
            "none",
            f'sum(increase({count}, notice="false"}}[$__range]))',
        ),
        number(
            "Takeovers with notice",
            "At the boundary of a step.",
            "none",
            f'sum(increase({count}, notice="true"}}[$__range]))',
        ),
        number("Pause, median", "From the first sign of a loss until the lost work is repeated.", "s", _pause(0.5)),
        number("Pause, p99", "From the first sign of a loss until the lost work is repeated.", "s", _pause(0.99)),
        number(
            "Time paused",
            "Sum of all pauses.",
            "s",
            increase(f"bamboo_job_takeover_pause_seconds_sum{{{J}}}", "$__range"),
        ),
    ]


def _preemptions() -> list[object]:
    return [
        graph(
            "Preemptions, announced or not",
            "In an hour. With notice, a worker leaves between two steps and nothing is repeated.",
            "none",
            Query(increase(f"bamboo_job_preemptions_total{{{J}}}", by="notice"), "notice: {{notice}}"),
            stacked=True,
        ),
        graph(
            "Signs by source",
            "Notices and losses that were seen in the cluster, in an hour, by reason.",
            "none",
            Query(increase(f"bamboo_job_signals_total{{{J}}}", by="source"), "{{source}}"),
            stacked=True,
        ),
    ]


def _takeovers() -> list[object]:
    rate = "[$__rate_interval]"
    return [
        warm(
            "Pauses",
            "How many takeovers paused for how long.",
            "s",
            increase(f"bamboo_job_takeover_pause_seconds_bucket{{{J}}}", by="le"),
        ),
        graph(
            "Pause by phase, mean",
            "decide: until the plan is made; reform: until it is in force at the new owner; "
            "recompute: until the lost work is repeated.",
            "s",
            Query(
                f"sum by (phase) (increase(bamboo_job_takeover_phase_seconds_sum{{{J}}}[1h]))"
                f" / (sum by (phase) (increase(bamboo_job_takeover_phase_seconds_count{{{J}}}[1h])) > 0)",
                "{{phase}}",
            ),
            stacked=True,
        ),
        graph(
            "Work of takeovers",
            "Passes of microbatches that were repeated, in an hour.",
            "none",
            Query(increase(f"bamboo_job_takeover_passes_total{{{J}}}", by="kind"), "{{kind}}"),
            stacked=True,
        ),
        graph(
            "Sent again",
            "What workers sent again from their message logs.",
            "Bps",
            Query(f"sum by (kind) (rate(bamboo_worker_resent_bytes_total{{{J}}}{rate}))", "{{kind}}"),
            stacked=True,
        ),
    ]


def _after() -> list[object]:
    return [
        graph(
            "Unprotected stages",
            "Until a second worker holds the state again.",
            "none",
            Query(f"bamboo_job_unprotected_stages{{{J}}}", NAME),
        ),
        graph(
            "Whole states sent",
            "To workers that become replicas.",
            "Bps",
            Query(
                "sum by (namespace, job) "
                f'(rate(bamboo_worker_sent_bytes_total{{{J}, kind="state"}}[$__rate_interval]))',
                NAME,
            ),
        ),
        graph(
            "Workers that failed",
            "Those that count for backoffLimit, in an hour.",
            "none",
            Query(f"sum by (namespace, job) (increase(bamboo_job_restarts_total{{{J}}}[1h]))", NAME),
        ),
    ]
