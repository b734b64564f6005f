"""What is allowed in a manifest and may surprise: a sentence for each. Pure."""

from bamboo.job.spec import JobSpec, RedundancyMode


def warnings(spec: JobSpec) -> tuple[str, ...]:
    """Each names the fields that it is about."""
    return tuple(filter(None, (_one_pipeline(spec),)))


def _one_pipeline(spec: JobSpec) -> str:
    """With several pipelines each stage lives on in the others."""
    if spec.topology.pipelines > 1:
        return ""
    ends = "the job goes back to its newest checkpoint" if spec.checkpoint else "the job ends"
    remedy = "with spec.topology.pipelines: 2 the other pipeline still has what they hold"
    if spec.redundancy.mode is RedundancyMode.NONE:
        return f"one pipeline and spec.redundancy.mode None: {ends} if any worker vanishes; {remedy}"
    if spec.topology.stages == 1:
        return f"one pipeline of one stage: {ends} if its worker vanishes before a standby is filled; {remedy}"
    return f"one pipeline: {ends} if two neighbouring workers vanish at the same time; {remedy}"
