"""A check that a release's tag matches all versions in the repository: distributions, their mutual pins, and the chart.

python .github/release_version.py v1.2.3
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
DISTRIBUTIONS = ("core", "client", "trainer", "operator")


def versions() -> Iterator[tuple[str, str]]:
    """Yield (place, version) for each distribution, each pin of one distribution in another, and the chart."""
    for folder in DISTRIBUTIONS:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        yield f"{folder}/pyproject.toml", project["version"]
        optional = [one for lines in project.get("optional-dependencies", {}).values() for one in lines]
        for one in (*project["dependencies"], *optional):
            if found := re.fullmatch(r"(bamboo[a-z-]*)(?:\[.*\])?==(.+)", one):
                yield f"{folder}/pyproject.toml, {found[1]}", found[2]
    chart = yaml.safe_load((ROOT / "charts" / "bamboo" / "Chart.yaml").read_text())
    yield "charts/bamboo/Chart.yaml, version", chart["version"]
    yield "charts/bamboo/Chart.yaml, appVersion", str(chart["appVersion"])


def main(tag: str) -> int:
    wrong = [f"{place} is {version}" for place, version in versions() if f"v{version}" != tag]
    for line in wrong:
        print(f"{line}, and the tag is {tag}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
