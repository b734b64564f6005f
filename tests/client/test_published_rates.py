"""The table of docs/benchmarks.md is made from reports: those that are committed, of which there is none yet."""

from bamboo.bench.published_rates import beside_published
from bamboo.bench.report import parse_report
from bamboo.profiles.files import read_devices
from bench_kit import WHOLE, report
from folders import ROOT


def test_a_report_stands_beside_what_others_publish() -> None:
    lines = beside_published([report(*WHOLE)], read_devices()).splitlines()
    assert len(lines) == 6
    assert lines[2] == "| torchtitan, compiled | Llama 3.1 8B | 8 x H100 | 6,667 | 33 to 39 | – |"
    assert lines[4].startswith(
        "| plain PyTorch (one process, plain PyTorch), 2026-11-26 | Llama 3.2 1B, bf16 | 1 x NVIDIA"
    )
    assert lines[4].endswith(" | 40,960 | 30 | – |")
    assert lines[5].startswith("| Bamboo (2 workers), 2026-11-26 | Llama 3.2 1B, bf16 | 2 x NVIDIA H100")
    assert lines[5].endswith(" | 36,864 | 27 | 10.0 % |")


def test_without_a_report_the_table_says_so() -> None:
    *_, plain, bamboo = beside_published([], read_devices()).splitlines()
    assert bamboo == plain.replace("plain PyTorch", "Bamboo")
    assert plain.count("not measured yet") == 3


def test_the_committed_table_is_that_of_the_committed_reports() -> None:
    files = sorted((ROOT / "bench" / "reports").glob("*.json"))
    reports = [parse_report(str(file), file.read_bytes()) for file in files]
    assert beside_published(reports, read_devices()) in (ROOT / "docs" / "benchmarks.md").read_text()
