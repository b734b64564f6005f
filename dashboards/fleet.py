"""Grafana dashboard of all jobs and of the operator."""

from grafana_foundation_sdk.models.dashboard import Dashboard
from parts import SOME_NAMESPACES as N
from parts import Query, build, goodput, graph, increase, listing, number, per_second

BY_JOB = "sum by (namespace, job)"
OPERATOR = "and on (instance) bamboo_operator_info"


def make() -> Dashboard:
    return build(
        "bamboo-fleet",
        "Bamboo / Fleet",
        "All BambooJobs: what runs, what it costs, what was preempted; and the operator.",
        [("Jobs", _jobs()), ("Disturbances", _disturbances()), ("Operator", _operator())],
        job=False,
    )


def _jobs() -> list[object]:
    running = f'bamboo_job_state{{{N}, state=~"Running|Degraded"}}'
    return [
        number("Jobs that train", "Jobs in state Running or Degraded.", "none", f"sum({running})"),
        number(
            "Jobs with problems",
            "Jobs that have failed, whose manifest is not valid, or that train degraded.",
            "none",
            f'sum(bamboo_job_state{{{N}, state=~"Failed|Invalid|Degraded"}})',
            steps=[(None, "green"), (1, "orange")],
        ),
        number(
            "Workers that train",
            "Workers that own a stage.",
            "none",
            f'sum(bamboo_job_workers{{{N}, state="training"}})',
        ),
        number(
            "Samples a second",
            "Of all jobs together.",
            "short",
            per_second(f"bamboo_job_samples_total{{{N}}}"),
        ),
        number(
            "Cost an hour",
            "Of all pods that have a node, by their pools' prices.",
            "none",
            f"sum(bamboo_job_cost_per_hour{{{N}}})",
        ),
        number(
            "Goodput",
            "Useful share of the paid worker time in the last hour.",
            "percentunit",
            goodput(N),
        ),
        listing(
            "Jobs",
            "Every job that the operator manages. Preemptions: in the time shown; cost: since the job began.",
            f"max by (namespace, job, state) (bamboo_job_state{{{N}}}) == 1",
            [
                ("Step", "none", f"max by (namespace, job) (bamboo_job_step{{{N}}})"),
                (
                    "Progress",
                    "percentunit",
                    f"max by (namespace, job) (bamboo_job_step{{{N}}} / bamboo_job_desired_steps{{{N}}})",
                ),
                ("Samples/s", "short", f"max by (namespace, job) (bamboo_job_samples_per_second{{{N}}})"),
                ("Workers ready", "none", f"max by (namespace, job) (bamboo_job_ready_workers{{{N}}})"),
                ("Workers wanted", "none", f"max by (namespace, job) (bamboo_job_desired_workers{{{N}}})"),
                ("Protected", "none", f"max by (namespace, job) (bamboo_job_protected{{{N}}})"),
                ("Unprotected stages", "none", f"max by (namespace, job) (bamboo_job_unprotected_stages{{{N}}})"),
                ("Preemptions", "none", f"{BY_JOB} (increase(bamboo_job_preemptions_total{{{N}}}[$__range]))"),
                ("Cost", "none", f"max by (namespace, job) (bamboo_job_cost_so_far{{{N}}})"),
            ],
        ),
        graph(
            "Jobs by state",
            "As in status.state.",
            "none",
            Query("sum by (state) (bamboo_operator_jobs) > 0", "{{state}}"),
            stacked=True,
        ),
        graph(
            "Samples a second by job",
            "Samples of committed steps.",
            "short",
            Query(f"{BY_JOB} (rate(bamboo_job_samples_total{{{N}}}[$__rate_interval]))", "{{namespace}}/{{job}}"),
        ),
    ]


def _disturbances() -> list[object]:
    return [
        graph(
            "Preemptions by job",
            "Workers lost or given notice, in an hour.",
            "none",
            Query(f"{BY_JOB} (increase(bamboo_job_preemptions_total{{{N}}}[1h]))", "{{namespace}}/{{job}}"),
        ),
        graph(
            "Pods by capacity",
            "Workers' pods that have not ended.",
            "none",
            Query(f"sum by (capacity) (bamboo_job_pods{{{N}}})", "{{capacity}}"),
            stacked=True,
        ),
        graph(
            "Workers missing",
            "Workers that a job requests and that are not ready.",
            "none",
            Query(
                f"{BY_JOB} (bamboo_job_desired_workers{{{N}}}) - {BY_JOB} (bamboo_job_ready_workers{{{N}}})",
                "{{namespace}}/{{job}}",
            ),
        ),
        graph(
            "Unprotected stages",
            "Stages whose state only one worker holds: losing it now would end the job, or cost a pipeline.",
            "none",
            Query(f"{BY_JOB} (bamboo_job_unprotected_stages{{{N}}})", "{{namespace}}/{{job}}"),
        ),
    ]


def _operator() -> list[object]:
    def p99(name: str, by: str = "") -> str:
        return f"histogram_quantile(0.99, sum by (le{by}) (rate({name}_bucket[$__rate_interval])))"

    return [
        graph(
            "Reconciliations",
            "Reconciliations of running jobs a second, by result.",
            "ops",
            Query(per_second("bamboo_operator_reconciles_total", by="result"), "{{result}}"),
        ),
        graph(
            "Duration of a reconciliation, p99",
            "With its calls to the API server.",
            "s",
            Query(p99("bamboo_operator_reconcile_duration_seconds"), "reconciliation"),
        ),
        graph(
            "Delay of events",
            "tick delay: how late coordinators' ticks are, which is what an event waits for. "
            "oldest: for how long the job that waited longest was not reconciled.",
            "s",
            Query(p99("bamboo_operator_tick_delay_seconds"), "tick delay, p99"),
            Query("max(bamboo_operator_oldest_reconcile_age_seconds)", "oldest"),
        ),
        graph(
            "Events",
            "Events that coordinators handled, per second, by type.",
            "ops",
            Query(per_second("bamboo_operator_events_total", by="event"), "{{event}}"),
        ),
        graph(
            "Calls to the API server",
            "Without the watches; by verb, resource and code.",
            "reqps",
            Query(
                "sum by (verb, resource, code) (rate(bamboo_operator_api_requests_total[$__rate_interval]))",
                "{{verb}} {{resource}} {{code}}",
            ),
        ),
        graph(
            "Latency of the API server, p99",
            "Of these calls.",
            "s",
            Query(p99("bamboo_operator_api_request_duration_seconds", ", verb, resource"), "{{verb}} {{resource}}"),
        ),
        graph(
            "What the API server reported",
            "Events of the watches, per second, by kind of object.",
            "ops",
            Query(per_second("bamboo_operator_watch_events_total", by="kind"), "{{kind}}"),
        ),
        graph(
            "Workers connected, events waiting",
            "Control channels, and events that wait for their coordinator.",
            "none",
            Query("sum(bamboo_operator_control_channels)", "connected workers"),
            Query("sum(bamboo_operator_event_queue_depth)", "waiting events"),
        ),
        graph(
            "Refused callers",
            "Connections to the workers' port that were refused, in an hour, by reason.",
            "none",
            Query(increase("bamboo_operator_refusals_total", by="reason"), "{{reason}}"),
        ),
        graph(
            "Memory",
            "Resident memory of the operator.",
            "bytes",
            Query(f"process_resident_memory_bytes {OPERATOR}", "{{instance}}"),
        ),
        graph(
            "Processor",
            "Cores that the operator uses. Above 0.8, events wait: it is a single thread.",
            "none",
            Query(f"rate(process_cpu_seconds_total[$__rate_interval]) {OPERATOR}", "{{instance}}"),
        ),
    ]
