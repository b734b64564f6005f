"""Grafana dashboard of jobs' costs, and of the share of the paid worker time that was useful (goodput)."""

from grafana_foundation_sdk.models.dashboard import Dashboard
from parts import SOME_JOBS as J
from parts import Query, build, graph, increase, number

NAME = "{{namespace}}/{{job}}"
BY_JOB = "sum by (namespace, job)"


def make() -> Dashboard:
    return build(
        "bamboo-cost",
        "Bamboo / Cost",
        "Cost by the prices of the node pools, in their currency; workers of pools without a price are not included.",
        [("In this time", _sums()), ("Cost", _cost()), ("Use", _use())],
    )


def _counted(name: str, time: str) -> str:
    """Return the query of a cost counter's growth: one series per job, even if several operators exported it."""
    return f"increase((max by (namespace, job) (bamboo_job_{name}_total{{{J}}}))[{time}:])"


def _sums() -> list[object]:
    useful = increase(f"bamboo_job_useful_worker_seconds_total{{{J}}}", "$__range")
    paid = increase(f"bamboo_job_paid_worker_seconds_total{{{J}}}", "$__range")
    cost = f"sum({_counted('cost', '$__range')})"
    samples = increase(f"bamboo_job_samples_total{{{J}}}", "$__range")
    return [
        number("Cost", "Of the jobs chosen, in the time shown.", "none", cost),
        number(
            "Cost at the end",
            "Of the jobs chosen that train now, from their first step to their last, if they go on as they do now.",
            "none",
            f"sum({BY_JOB} (bamboo_job_cost_so_far{{{J}}}) + {BY_JOB} (bamboo_job_cost_per_hour{{{J}}})"
            f" * {BY_JOB} (bamboo_job_eta_seconds{{{J}}}) / 3600)",
        ),
        number("Cost an hour, now", "Of all pods that have a node.", "none", f"sum(bamboo_job_cost_per_hour{{{J}}})"),
        number(
            "Cost of a million samples, in this time",
            "Cost over samples, in the time shown.",
            "none",
            f"1e6 * {cost} / {samples}",
        ),
        number(
            "Goodput", "Useful share of the paid worker time, in the time shown.", "percentunit", f"{useful} / {paid}"
        ),
        number("Paid worker hours", "Pods with a node, times time.", "h", f"{paid} / 3600"),
        number(
            "Spot",
            "Share of the pods with a node that are on spot capacity.",
            "percentunit",
            f'sum(bamboo_job_paid_pods{{{J}, capacity="Spot"}}) / sum(bamboo_job_paid_pods{{{J}}})',
        ),
    ]


def _cost() -> list[object]:
    return [
        graph(
            "Cost an hour by job",
            "What the pods that have a node cost.",
            "none",
            Query(f"bamboo_job_cost_per_hour{{{J}}}", NAME),
            stacked=True,
        ),
        graph("Cost so far by job", "Since each job began.", "none", Query(f"bamboo_job_cost_so_far{{{J}}}", NAME)),
        graph(
            "Cost of a million samples",
            "In the last hour, and over the whole job so far.",
            "none",
            Query(
                f"1e6 * {_counted('cost', '1h')} / ({BY_JOB} (increase(bamboo_job_samples_total{{{J}}}[1h])) > 0)",
                f"{NAME}, last hour",
            ),
            Query(f"bamboo_job_cost_per_million_samples{{{J}}}", f"{NAME}, so far"),
        ),
        graph(
            "Time that repeated steps take",
            "Share of the time, at the usual duration of a step.",
            "percentunit",
            Query(f"{BY_JOB} (rate(bamboo_job_repeated_seconds_total{{{J}}}[1h]))", NAME),
        ),
        graph(
            "Cost an hour of what was not useful",
            "Paid time that is not in goodput, in money: standby, starting, waiting, pauses and repeated work.",
            "none",
            Query(
                f"{BY_JOB} (bamboo_job_cost_per_hour{{{J}}})"
                f" * (1 - {BY_JOB} (rate(bamboo_job_useful_worker_seconds_total{{{J}}}[$__rate_interval]))"
                f" / {BY_JOB} (rate(bamboo_job_paid_worker_seconds_total{{{J}}}[$__rate_interval])))",
                NAME,
            ),
        ),
    ]


def _use() -> list[object]:
    return [
        graph(
            "Goodput by job",
            "Useful share of the paid worker time.",
            "percentunit",
            Query(
                f"{BY_JOB} (rate(bamboo_job_useful_worker_seconds_total{{{J}}}[$__rate_interval]))"
                f" / {BY_JOB} (rate(bamboo_job_paid_worker_seconds_total{{{J}}}[$__rate_interval]))",
                NAME,
            ),
            most=1,
        ),
        graph(
            "Paid pods by capacity",
            "Workers' pods that have a node.",
            "none",
            Query(f"sum by (capacity) (bamboo_job_paid_pods{{{J}}})", "{{capacity}}"),
            stacked=True,
        ),
        graph(
            "Jobs in a fallback pool",
            "1 while a worker is in a pool that is used only when the pools before it have no nodes.",
            "none",
            Query(f'bamboo_job_condition{{{J}, condition="FallbackActive"}}', NAME),
        ),
        graph(
            "Workers that own no stage",
            "Ready and paid for, on standby or receiving state.",
            "none",
            Query(
                f'sum by (namespace, job, state) (bamboo_job_workers{{{J}, state=~"standby|syncing|starting"}})',
                f"{NAME}, {{{{state}}}}",
            ),
            stacked=True,
        ),
    ]
