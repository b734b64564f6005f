"""Requirements of compiled layers: a missing one is reported before a job begins."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from bamboo_core.job.training_spec import TrainingSpec
from bamboo_trainer.check import check
from bamboo_trainer.stage.compilation import CompilerUnavailable, require_toolchain, toolchain
from manifest_kit import bamboojob, gpt_task, training

COMPILED = TrainingSpec(steps=1, global_batch_size=1, micro_batch_size=1, compile=True)
PLAIN = TrainingSpec(steps=1, global_batch_size=1, micro_batch_size=1)


@pytest.fixture(autouse=True)
def _looked_for_anew() -> Iterator[None]:
    toolchain.cache_clear()
    yield
    toolchain.cache_clear()


def test_the_compiler_says_what_it_is() -> None:
    require_toolchain(COMPILED, gpu=False)
    assert any(character.isdigit() for character in toolchain(gpu=False).version)


def without_compiler(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def failing_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    compiler = folder / "broken"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


def without_headers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))


@pytest.mark.parametrize(
    ("lose", "lacks"),
    [
        (without_compiler, r"a C\+\+ compiler \(no-such-compiler\)"),
        (failing_compiler, r"a C\+\+ compiler \(.*broken\)"),
        (without_headers, r"Python's headers \(Python\.h in .*\)"),
    ],
)
def test_what_lacks_is_named(lose, lacks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lose(monkeypatch, tmp_path)
    assert toolchain(gpu=False).version == ""
    with pytest.raises(CompilerUnavailable, match=f"^spec.training.compile: torch.compile needs {lacks}, which is not"):
        require_toolchain(COMPILED, gpu=False)
    require_toolchain(PLAIN, gpu=False)


def test_a_job_is_checked_for_it_before_it_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = check(bamboojob(task=gpt_task(), training=training(2, 4, 2, compile=True), topology={"stages": 1}))
    assert found["problem"].startswith("spec.training.compile: torch.compile needs a C++ compiler")
