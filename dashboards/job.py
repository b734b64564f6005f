"""Grafana dashboard of one job: progress, workers, takeovers, and the use of time and memory."""

from grafana_foundation_sdk.models.dashboard import Dashboard
from parts import ONE_JOB as J
from parts import Query, build, goodput, graph, increase, number, per_second, quantile, warm, words

BUBBLE = "idle|rehearsal"


def make() -> Dashboard:
    return build(
        "bamboo-job",
        "Bamboo / Job",
        "One BambooJob: its progress, its workers, and how they use time, network and memory.",
        [
            ("Now", _now()),
            ("Progress", _progress()),
            ("Workers", _workers()),
            ("Preemptions and takeovers", _takeovers()),
            ("Checkpoints", _checkpoints()),
            ("Time", _time()),
            ("Network and memory", _resources()),
        ],
        several=False,
    )


def _job(name: str, legend: str) -> Query:
    """Return the query of the metric bamboo_job_NAME for the job shown. legend: as in `Query`."""
    return Query(f"bamboo_job_{name}{{{J}}}", legend)


def _now() -> list[object]:
    return [
        words("State", "As in status.state.", Query(f"bamboo_job_state{{{J}}} == 1", "{{state}}"), width=4),
        number(
            "Progress",
            "Committed steps of those that the job requests.",
            "percentunit",
            f"bamboo_job_step{{{J}}} / bamboo_job_desired_steps{{{J}}}",
        ),
        number("Time left", "At the usual duration of a step.", "s", f"bamboo_job_eta_seconds{{{J}}}"),
        number("Loss now", "Of the last committed step.", "none", f"bamboo_job_loss{{{J}}}"),
        number(
            "Samples a second, now",
            "At the usual duration of a step.",
            "short",
            f"bamboo_job_samples_per_second{{{J}}}",
        ),
        number(
            "Goodput",
            "Useful share of the paid worker time in the last hour.",
            "percentunit",
            goodput(J),
            steps=[(None, "red"), (0.5, "orange"), (0.8, "green")],
        ),
        words(
            "Conditions that hold",
            "As in status.conditions.",
            Query(f"bamboo_job_condition{{{J}}} == 1", "{{condition}}"),
            width=12,
        ),
        words(
            "Protected",
            "yes: any single worker could be lost without losing state. Else the reason; RedundancyOff is intended.",
            Query(f"max by (reason) (bamboo_job_protected{{{J}}}) == 1", "yes"),
            Query(f"max by (reason) (bamboo_job_protected{{{J}}}) == 0", "{{reason}}"),
            width=4,
        ),
        number(
            "Preemptions",
            "Workers lost or given notice, in the time shown.",
            "none",
            increase(f"bamboo_job_preemptions_total{{{J}}}", "$__range"),
        ),
        number(
            "Steps at risk",
            "Steps since the newest checkpoint. Nothing if the job keeps none.",
            "none",
            f"max(bamboo_job_step{{{J}}}) - max(bamboo_job_checkpoint_step{{{J}}})",
        ),
        number(
            "Age of the newest checkpoint",
            "Since it was complete.",
            "s",
            f"max(bamboo_job_checkpoint_age_seconds{{{J}}})",
        ),
        number("Cost so far", "By the prices of the node pools.", "none", f"max(bamboo_job_cost_so_far{{{J}}})"),
    ]


def _progress() -> list[object]:
    steps = f"bamboo_worker_step_duration_seconds_bucket{{{J}}}"
    return [
        graph("Loss", "Of the last committed step.", "none", _job("loss", "loss")),
        graph(
            "Evaluation",
            "What was measured of the model on other data, by metric.",
            "none",
            _job("evaluation", "{{metric}}"),
            _job("evaluated_step", "after step"),
        ),
        graph(
            "Skipped steps",
            "In an hour: steps that left the model as it was, because their loss or gradient was not finite.",
            "none",
            Query(increase(f"bamboo_job_skipped_steps_total{{{J}}}"), "skipped"),
        ),
        graph(
            "Duration of a step",
            "usual: median of the last 20 steps, by the coordinator; p50 and p99: of all steps, by the workers.",
            "s",
            _job("step_duration_seconds", "usual"),
            Query(quantile(0.5, steps), "p50"),
            Query(quantile(0.99, steps), "p99"),
        ),
        graph(
            "Samples a second",
            "Samples of committed steps.",
            "short",
            Query(per_second(f"bamboo_job_samples_total{{{J}}}"), "samples"),
        ),
        graph("Steps", "Committed ones.", "none", _job("step", "step")),
    ]


def _workers() -> list[object]:
    return [
        graph(
            "Workers by what they do",
            "Workers that have joined.",
            "none",
            _job("workers", "{{state}}"),
            stacked=True,
        ),
        graph(
            "Workers wanted and ready",
            "Missing workers are added as soon as there are nodes; those out of date are replaced one after the other.",
            "none",
            _job("desired_workers", "wanted"),
            _job("ready_workers", "ready"),
            _job("updated_workers", "ready and up to date"),
        ),
        graph(
            "Pipelines",
            "Pipelines of the plan and wanted ones, and stages without a second copy.",
            "none",
            _job("desired_pipelines", "wanted"),
            _job("pipelines", "in the plan"),
            _job("unprotected_stages", "unprotected stages"),
        ),
        graph(
            "Replicas",
            "Of the stage that has the fewest in step, and how many are wanted.",
            "none",
            _job("desired_replicas", "wanted"),
            _job("replicas", "in step"),
        ),
        graph(
            "Pods by pool",
            "Workers' pods that have not ended.",
            "none",
            _job("pods", "{{pool}} ({{capacity}})"),
            stacked=True,
        ),
    ]


def _takeovers() -> list[object]:
    count, pauses = (f"bamboo_job_takeover_pause_seconds_{part}{{{J}" for part in ("count", "bucket"))
    return [
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
        number(
            "Pause, median",
            "From the first sign of a loss until the lost work is repeated.",
            "s",
            quantile(0.5, f"{pauses}}}", "$__range"),
        ),
        number(
            "Pause, p99",
            "From the first sign of a loss until the lost work is repeated.",
            "s",
            quantile(0.99, f"{pauses}}}", "$__range"),
        ),
        number(
            "Time paused",
            "Sum of all pauses.",
            "s",
            increase(f"bamboo_job_takeover_pause_seconds_sum{{{J}}}", "$__range"),
        ),
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
        warm(
            "Pauses",
            "How many takeovers paused for how long.",
            "s",
            increase(f"{pauses}}}", by="le"),
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
            "Workers that failed",
            "Those that count for backoffLimit, in an hour.",
            "none",
            Query(increase(f"bamboo_job_restarts_total{{{J}}}"), "failed"),
        ),
        graph(
            "Whole states sent",
            "To workers that become replicas.",
            "Bps",
            Query(per_second(f'bamboo_worker_sent_bytes_total{{{J}, kind="state"}}'), "state"),
        ),
    ]


def _checkpoints() -> list[object]:
    duration, stall = (f"bamboo_job_checkpoint_{name}_seconds_bucket{{{J}}}" for name in ("duration", "stall"))
    return [
        graph(
            "Steps since the newest checkpoint",
            "at risk: repeated if the job has to go back now. interval: as in the manifest.",
            "none",
            Query(f"max(bamboo_job_step{{{J}}}) - max(bamboo_job_checkpoint_step{{{J}}})", "at risk"),
            Query(f"max(bamboo_job_checkpoint_every_steps{{{J}}})", "interval"),
        ),
        graph(
            "Duration of checkpoints",
            "From the commit of a checkpoint's step until its manifest was written. Training goes on.",
            "s",
            Query(quantile(0.5, duration, "1h"), "p50"),
            Query(quantile(0.99, duration, "1h"), "p99"),
        ),
        graph(
            "Stall for checkpoints",
            "How long training waits for the copies in host memory, in the last hour.",
            "s",
            Query(quantile(0.5, stall, "1h"), "p50"),
            Query(quantile(0.99, stall, "1h"), "p99"),
        ),
        graph(
            "Stall for checkpoints by worker",
            "Share of a worker's time in which it copies its layers.",
            "percentunit",
            Query(per_second(f"bamboo_worker_checkpoint_stall_seconds_total{{{J}}}", by="pod"), "{{pod}}"),
        ),
        graph(
            "Written to the store",
            "All workers together; also of checkpoints that were given up.",
            "Bps",
            Query(per_second(f"bamboo_job_checkpoint_written_bytes_total{{{J}}}"), "as reported"),
            Query(per_second(f"bamboo_worker_checkpoint_written_bytes_total{{{J}}}", by="pod"), "{{pod}}"),
        ),
        graph(
            "Checkpoints that failed",
            "Given up, and not usable when the job went back to them, in an hour, by reason.",
            "none",
            Query(increase(f"bamboo_job_checkpoints_abandoned_total{{{J}}}", by="reason"), "given up: {{reason}}"),
            Query(increase(f"bamboo_job_restore_problems_total{{{J}}}", by="reason"), "not usable: {{reason}}"),
        ),
        graph(
            "Going back to a checkpoint",
            "In an hour, by cause.",
            "none",
            Query(increase(f"bamboo_job_restores_total{{{J}}}", by="cause"), "{{cause}}"),
        ),
        graph(
            "Repeated steps",
            "In an hour: steps that had to be repeated.",
            "none",
            Query(increase(f"bamboo_job_repeated_steps_total{{{J}}}"), "steps"),
        ),
    ]


def _time() -> list[object]:
    rate = f"rate(bamboo_worker_time_seconds_total{{{J}"
    workers = f"count(bamboo_worker_info{{{J}}})"
    every = f'sum({rate}, kind=~"{BUBBLE}"}}[$__rate_interval]))'
    return [
        graph(
            "Where the time goes",
            "Share of all workers' time, by kind. The rest up to 100 % is the engine itself: frames, plans.",
            "percentunit",
            Query(f"sum by (kind) ({rate}}}[$__rate_interval])) / on () group_left () {workers}", "{{kind}}"),
            stacked=True,
            most=1,
        ),
        graph(
            "Bubble",
            "Share of the workers' time in which they wait for each other.",
            "percentunit",
            Query(f"{every} / {workers}", "bubble"),
            most=1,
        ),
        graph(
            "Redundant work",
            "Seconds per second, all workers together.",
            "s",
            Query(f'sum by (kind) ({rate}, kind=~"rehearsal|replica_update"}}[$__rate_interval]))', "{{kind}}"),
            stacked=True,
        ),
        graph(
            "Idle time by worker",
            "Seconds per second. A worker that is idle more than others has too small a stage.",
            "percentunit",
            Query(f'sum by (pod) ({rate}, kind="idle"}}[$__rate_interval]))', "{{pod}}"),
            most=1,
        ),
        graph(
            "A microbatch, by worker",
            "Forward and backward of the stages that it runs, without waits. The longest one holds all others up.",
            "s",
            Query(f"sum by (pod) (bamboo_worker_microbatch_seconds{{{J}}})", "{{pod}}"),
        ),
        graph(
            "Slow workers",
            "Stragglers: what they take for a microbatch (own) and what others would (usual); and how many there are.",
            "s",
            _job("straggler_microbatch_seconds", "{{worker}}, {{whose}}"),
            _job("stragglers", "stragglers"),
        ),
    ]


def _resources() -> list[object]:
    return [
        graph(
            "Sent by kind",
            "All workers together. sync and state update replicas; reduction combines the pipelines' gradients.",
            "Bps",
            Query(per_second(f"bamboo_worker_sent_bytes_total{{{J}}}", by="kind"), "{{kind}}"),
            stacked=True,
        ),
        graph(
            "Sent again",
            "What workers sent again from their message logs.",
            "Bps",
            Query(per_second(f"bamboo_worker_resent_bytes_total{{{J}}}", by="kind"), "again: {{kind}}"),
        ),
        graph(
            "Sent in a step, by kind",
            "What a worker sends to the others in a step: the mean over steps and workers.",
            "bytes",
            _job("step_sent_bytes", "{{kind}}"),
            stacked=True,
        ),
        graph(
            "Memory of workers",
            "The most that each worker has taken so far, of its GPU or without GPUs of the host, and the least limit.",
            "bytes",
            Query(f"bamboo_worker_memory_peak_bytes{{{J}}}", "{{pod}}"),
            Query(f"min(bamboo_worker_memory_limit_bytes{{{J}}})", "limit"),
        ),
        graph(
            "Links that broke",
            "Links between workers of the plan, in an hour. Every preemption breaks some.",
            "none",
            Query(increase(f"bamboo_worker_broken_links_total{{{J}}}"), "links"),
        ),
    ]
