"""The types of a manifest's fields in Python are those of the CRD."""

import runpy
import typing
from typing import Any, get_type_hints

import yaml

from bamboo.jobs import fields
from bamboo_core.job.model import api_fields
from bamboo_core.job.spec import JobSpec
from folders import ROOT

GENERATOR: dict[str, Any] = runpy.run_path(str(ROOT / "crds" / "generate_python.py"))


def test_they_are_not_stale() -> None:
    """Else `make docs` makes them anew."""
    crd = yaml.safe_load((ROOT / "crds" / "bamboojob.yaml").read_text())
    assert (ROOT / "client" / "bamboo" / "jobs" / "fields.py").read_text() == GENERATOR["module"](crd)


def test_every_part_of_a_job_has_its_type() -> None:
    hints = get_type_hints(fields.JobFields)
    assert {"task", *hints} == {one.name for one in api_fields(JobSpec)}
    assert hints["training"] is fields.TrainingFields
    assert fields.TrainingFields.__required_keys__ == {"globalBatchSize", "microBatchSize"}
    assert typing.get_args(get_type_hints(fields.TopologyFields)["stages"]) == (int, typing.Literal["Auto"])
