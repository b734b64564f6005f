"""`bamboo research`: its output and its flags."""

import csv
import io
import json

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app


def test_the_command_prints_each_case_in_every_form() -> None:
    def called(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["research", "--jobs", "1", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    rates = ("--preempt-rate", "0.01", "--preempt-rate", "0.5", "--seeds", "1:2", "--steps", "3000")
    documents = json.loads(called(*rates, "--output", "json"))
    found = [(one["case"], one["runs"], one["mean"]["steps"]) for one in documents]
    assert found == [("0.01", 2, 3000), ("0.5", 2, 3000)]
    rows = list(csv.DictReader(io.StringIO(called(*rates, "--output", "csv"))))
    assert [float(row["nodes"]) for row in rows] == [one["mean"]["nodes"] for one in documents]
    assert "SAMPLES/S" in called(*rates)
    bugs = ("--without-bug", "double-rendezvous", "--without-bug", "mean-of-ratios")
    assert json.loads(called(*rates, *bugs, "-o", "json"))[0]["mean"]["value"] != documents[0]["mean"]["value"]


def test_hours_alone_are_not_cut_short_by_the_published_steps() -> None:
    """Otherwise such a run could not be the published program's, which goes on until its time is over."""
    arguments = ("--preempt-rate", "0", "--seeds", "1:1", "--hours", "12", "--jobs", "1", "-o", "json")
    done = CliRunner().invoke(app, ["research", *arguments])
    (found,) = json.loads(done.stdout)
    assert found["mean"]["hours"] > 11.9
    assert found["mean"]["steps"] > 22_194


def test_the_command_under_a_trace(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("traces") / "t.csv"
    file.write_text("".join(f"0,add,n{number}\n" for number in range(13)) + "1800000,remove,n3\n3600000,remove,n5\n")
    done = CliRunner().invoke(app, ["research", "--trace", str(file), "-o", "json"])
    (found,) = json.loads(done.stdout)
    assert (found["case"], found["runs"], found["mean"]["preemptions"]) == ("t.csv", 1, 2)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "--preempt-rate or --trace: expected one of them"),
        (["--preempt-rate", "2"], "--preempt-rate 2: expected a probability from 0 to 1"),
        (["--preempt-rate", "nan"], "--preempt-rate nan: expected a probability"),
        (["--preempt-rate", "0.1", "--trace", "t.csv"], "--preempt-rate: cannot be combined with --trace"),
        (["--trace", "t.csv", "--seeds", "3"], "--seeds: cannot be combined with --trace"),
        (["--trace", "/no/such"], "cannot read /no/such: No such file or directory"),
        (["--preempt-rate", "0.1", "--seeds", "x"], "--seeds must be a number of seeds or A:B, not 'x'"),
        (["--preempt-rate", "0.1", "--seeds", "5:4"], "--seeds must name from 1 to 1000000 seeds, not '5:4'"),
        (["--preempt-rate", "0.1", "--workload", "vgg"], "--steps or --hours: expected one of them"),
        (["--preempt-rate", "0.1", "--workload", "x"], "--workload must be one of gpt-2, bert, resnet"),
        (["--preempt-rate", "0.1", "--hours", "0"], "--hours must be more than 0 and at most 87600, not 0"),
        (["--preempt-rate", "0.1", "--without-bug", "x"], "--without-bug must be one of double-rendezvous"),
    ],
)
def test_wrong_flags_are_named(arguments: list[str], problem: str) -> None:
    done = CliRunner().invoke(app, ["research", *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"bamboo: {problem}")
    assert done.stderr.count("\n") == 1
