"""The CRD and docs/api.md, compared with the present output of their generators."""

import re
import runpy
from typing import Any

import yaml

from crd_kit import CRD, FILE, ROOT, nodes, refusals

OF_CRD: dict[str, Any] = runpy.run_path(str(ROOT / "crds" / "generate.py"))
GENERATOR: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate_api.py"))
PAGE = (ROOT / "docs" / "api.md").read_text()


def test_the_crd_is_not_stale() -> None:
    frame = yaml.safe_load(OF_CRD["FRAME"].read_text())
    assert OF_CRD["text"](OF_CRD["crd"](frame)) == FILE.read_text(), "run `make docs`"


def test_the_page_is_not_stale() -> None:
    assert GENERATOR["page"](CRD) == PAGE, "run `make docs`"


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
