"""docs/api.md: every field is on it, and its example is valid."""

import re
import runpy
from typing import Any

import yaml

from crd_kit import CRD, ROOT, nodes, refusals

GENERATOR: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate_api.py"))
PAGE = (ROOT / "docs" / "api.md").read_text()


def test_every_field_is_on_it() -> None:
    whole = GENERATOR["page"](CRD, whole=True)
    sections = dict(re.findall(r"^##+ ((?:spec|status)\S*)\n(.*?)(?=^##|\Z)", whole, re.MULTILINE | re.DOTALL))
    for path, node in nodes():
        if path.startswith(("spec", "status")) and "properties" in node:
            assert re.findall(r"^\| `(\w+)`", sections.pop(path), re.MULTILINE) == list(node["properties"])
        if path.startswith("status") and "properties" in node:
            assert f"`{path}`: {', '.join(f'`{name}`' for name in node['properties'])}\n" in PAGE
    assert sections == {}


def test_the_example_on_the_page_of_the_api_is_valid() -> None:
    example = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    assert refusals(yaml.safe_load(example[1])) == []
