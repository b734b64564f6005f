"""The operator's command line: one-sentence errors about wrong flags and a missing cluster."""

from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from bamboo_core.names import EXIT_FAILED, EXIT_USAGE
from bamboo_operator.__main__ import command
from certificates import issue


def start(folder: Path, *flags: str) -> Result:
    (folder / "key").write_bytes(b"k" * 32)
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, ["--key-file", str(folder / "key"), *flags])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--label-active"], "--label-active: expected --lease as well"),
        (["--lease", "bamboo-operator"], '--lease: expected NAMESPACE/NAME, got "bamboo-operator"'),
        (["--node-marks", "FOLDER/none.json"], "--node-marks: FOLDER/none.json: no such file"),
        (["--node-marks", "FOLDER/marks.json"], "--node-marks: nodeMarks[0]: expected exactly one of taint"),
        (["--node-marks", "FOLDER/marks.json"], "--node-marks: more: unknown field"),
        (["--tls-ca", "FOLDER/empty"], "--tls-ca: Empty certificate data"),
        (["--tls-ca", "FOLDER/latin"], "--tls-ca: 'ascii' codec can't decode"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "marks.json").write_text('{"nodeMarks": [{"reason": "A", "gone": true}], "more": 1}')
    (tmp_path / "empty").touch()
    (tmp_path / "latin").write_text("\u00e9")
    result = start(tmp_path, *issue(tmp_path), *(flag.replace("FOLDER", str(tmp_path)) for flag in flags))
    assert result.exit_code == EXIT_USAGE
    assert result.output.startswith("bamboo-operator: ")
    assert sentence.replace("FOLDER", str(tmp_path)) in result.output


def test_an_operator_without_a_cluster_ends_with_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    result = start(tmp_path)
    assert result.exit_code == EXIT_FAILED
    assert f"bamboo-operator: no cluster: there is no kubeconfig ({tmp_path / 'none'}); set KUBECONFIG" in result.output
