"""Generate the table of preemption notices in docs/troubleshooting.md from `cloud_marks` (`make docs`). A test fails if
the table is stale, and another test tries every mark in it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from bamboo_operator.signals import cloud_marks as marks

PAGE = Path(__file__).with_name("troubleshooting.md")
CLUSTER_TESTS = Path(__file__).parent.parent / "tests" / "cluster"
BEGIN = "<!-- notices: made by `make docs` from cloud_marks.py -->\n"
END = "<!-- end of notices -->\n"

WRITERS = {  # who writes the marks of a source, by the beginning of its name
    "Aws": "AWS",
    "Karpenter": "Karpenter",
    "Gke": "GKE",
    "Azure": "Azure",
    "Aks": "AKS",
    "OpenShift": "OpenShift",
    "Gpu": "NVSentinel",
    "CloudMaintenance": "NVSentinel",
    "ClusterAutoscaler": "autoscaler",
    "NodeDrain": "Kubernetes 1.37",
    "NodeMaintenance": "Kubernetes 1.37",
    "Node": "Kubernetes",
}
SHORTER = {  # notes where less time may be left than the mark alone says, by the same
    "Aws": "or what is left of it",
    "Karpenter": "or until its deadline",
    "Azure": "or until the time in it",
}

Mark = tuple[str, str]  # where it stands, and its text


def page(text: str) -> str:
    """Return the page's text with a new table; everything else stays."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name} lacks the comments between which the table belongs"
    return f"{before}{BEGIN}\n" + "\n".join(_table()) + f"\n\n{END}{after}"


def _table() -> Iterator[str]:
    yield from ("| Source | Written by | Exact mark | Notice | Tried |", "| --- | --- | --- | --- | --- |")
    by_source = defaultdict[tuple[str, float | None], list[Mark]](list)
    for source, seconds, *mark in _marks():
        by_source[source, seconds].append((mark[0], mark[1]))
    for (source, seconds), found in sorted(by_source.items(), key=lambda one: _order(one[0][0])):
        cells = (f"`{source}`", _by_beginning(WRITERS, source), _shown(found), _notice(source, seconds), _tried(found))
        yield f"| {' | '.join(cells)} |"


def _marks() -> Iterator[tuple[str, float | None, str, str]]:
    """Yield the source, seconds of notice (None: the node is gone), place and text of each mark."""
    for key, mark in marks.TAINTS.items():
        yield mark.source, mark.seconds, "taint", key
    for place, table in (
        ("taint", marks.TAINTS_WITH_VALUE),
        ("condition", marks.CONDITIONS),
        ("label", marks.LABELS),
    ):
        for pair, mark in table.items():
            yield mark.source, mark.seconds, place, "=".join(pair)
    for kind, mark in marks.CONDITION_TYPES.items():
        yield mark.source, mark.seconds, "condition", kind
    for mark, place, text in (
        (marks.SHUTDOWN, "false condition Ready with", marks.SHUTTING_DOWN),
        (marks.KARPENTER_TERMINATION, "annotation", marks.KARPENTER_DEADLINE),
        (marks.DELETING, "field", "metadata.deletionTimestamp"),
    ):
        yield mark.source, mark.seconds, place, text


def _order(source: str) -> tuple[int, str]:
    for number, begins in enumerate(WRITERS):
        if source.startswith(begins):
            return number, source
    raise SystemExit(f"{source}: expected the beginning of its name, and who writes its mark, in WRITERS")


def _by_beginning(table: Mapping[str, str], source: str) -> str:
    return next((text for begins, text in table.items() if source.startswith(begins)), "")


def _shown(found: Sequence[Mark]) -> str:
    by_place = defaultdict[str, list[str]](list)
    for place, text in found:
        by_place[place].append(f"`{text}`")
    return "; ".join(f"{place} {', '.join(texts)}" for place, texts in by_place.items())


def _notice(source: str, seconds: float | None) -> str:
    if seconds is None:
        return "none: lost"
    shorter = _by_beginning(SHORTER, source)
    return f"{seconds:.0f} s" + (f", {shorter}" if shorter else "")


def _tried(found: Sequence[Mark]) -> str:
    """Return how the tests try the marks: "API server" for a mark that a cluster test names, "object" for a mark that
    is tried only in plain objects; both if the marks differ in this.
    """
    texts = [text.partition(": ")[0].partition("=")[0] for _, text in found]
    return ", ".join(sorted({"API server" if text in _cluster_tests() else "object" for text in texts}))


@cache
def _cluster_tests() -> str:
    return "\n".join(path.read_text() for path in sorted(CLUSTER_TESTS.glob("test_*.py")))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
