"""The fields of the API's types and their marks, as `api_fields` reads them from annotations."""

from bamboo_core.job.model import (
    Mark,
    api_fields,
)
from bamboo_core.job.spec import JobSpec


def test_marks_say_what_they_can_say() -> None:
    """No spec field is both FIXED and WHILE_SUSPENDED. FREE marks only fields inside a field with one of the two."""
    for one in api_fields(JobSpec):
        inside = api_fields(one.form.kind) if hasattr(one.form, "kind") else ()
        assert not one.marks >= {Mark.FIXED, Mark.WHILE_SUSPENDED}
        assert Mark.FREE not in one.marks
        stays = bool(one.marks & {Mark.FIXED, Mark.WHILE_SUSPENDED})
        assert all(stays for inner in inside if Mark.FREE in inner.marks)
