"""Files that contain no manifest or cannot be read, and the error message about each."""

from pathlib import Path

import pytest

from bamboo_core.job.manifest import ManifestError, Problem, load_manifest
from manifest_kit import MINIMAL


def file_problem(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "job.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ManifestError) as caught:
        load_manifest(path)
    (problem,) = caught.value.problems
    assert problem.path == str(path)
    return problem.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ("a: [", "not valid YAML at line 1, column 5: expected the node content, but found '<stream end>'"),
        ("a: 1\nb: 2\na: 3\n", 'not valid YAML at line 3, column 1: duplicate key "a"'),
        ("[1]: 2", "not valid YAML at line 1, column 1: a key is not a string"),
        ("a: &a {b: 1}\nc: {<<: *a}\n", "not valid YAML at line 2, column 5: merge keys (<<) are refused"),
        (MINIMAL + "---\n" + MINIMAL, "expected one document, got 2"),
        (b"\xff\xfe\x00", "not valid YAML: not UTF-8 text"),
        ("a: \x01", "not valid YAML: special characters are not allowed"),
        ('a: !!int ""', "not valid YAML: a value does not fit its tag"),
        ("a: !!bool maybe", "not valid YAML: a value does not fit its tag"),
        ("!!python/object/apply:os.getcwd []", "could not determine a constructor for the tag"),
        ("a: " + "9" * 5000, "not valid YAML: a value does not fit its tag"),
        ("[" * 1500, "not valid YAML: nested too deeply"),
        ("#" * (1 << 20) + "#", "larger than 1 MiB"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_file_that_is_no_manifest(tmp_path: Path, content: str | bytes, message: str) -> None:
    assert message in file_problem(tmp_path, content)


@pytest.mark.parametrize(
    ("name", "message"), [("absent.yaml", "no such file"), (".", "cannot be read: Is a directory")]
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        load_manifest(tmp_path / name)
    assert caught.value.problems == (Problem(str(tmp_path / name), message),)
