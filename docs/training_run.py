"""Make the figures of docs/training-run.md: a GPT trained on real text, undisturbed and with a dozen workers killed.

    python docs/training_run.py FOLDER [--steps 60] [--batch 4] [--length 64]

FOLDER gets the texts of this machine (Python's standard library, /usr/share/doc, manual pages), a tokenizer trained on
them, and both runs, which train at the same time. The command can be repeated after an interruption: it keeps complete
parts of FOLDER and makes the others. It always draws the figures in docs/images anew, for which it needs Chromium.
"""

import argparse
import asyncio
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from bamboo_core.history.files import find  # noqa: E402
from bamboo_core.history.merge import curve, merged, newest  # noqa: E402
from bamboo_core.history.records import EvaluationRecord, StepRecord  # noqa: E402
from chromium_kit import MISSING, browser, chromium  # noqa: E402

KILLS: Final = 12
TEXT_CHARACTERS: Final = 8_000_000
VALIDATION_SHARE: Final = 20  # every 20th document is for validation
WORDS: Final = 8192
END: Final = "<|endoftext|>"
RUNS: Final = ("undisturbed", "disturbed")
HIDDEN: Final = {"test", "tests", "site-packages", "idlelib", "__pycache__"}
COLOURS: Final = {"undisturbed": "#1b6ca8", "disturbed": "#f2a541"}
PORT: Final = 16_006


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a training run. batch: samples in a step. length: tokens in a sample."""

    steps: int = 60
    batch: int = 4
    length: int = 64

    @property
    def kills(self) -> list[tuple[int, int]]:
        """The step and the stage of each kill. Every fourth one hits stage 0, whose owner is the root."""
        return [((4 * n + 6) * self.steps // 60, (3 * n + 1) % 4) for n in range(KILLS)]

    @property
    def twelfth(self) -> int:
        return max(1, self.steps // 12)


def job(folder: Path, size: Size) -> dict[str, Any]:
    """Return the manifest: about 33 million parameters in 11 layers on four stages, and one standby worker."""
    return {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "gpt"},
        "spec": {
            "task": {
                "entrypoint": "bamboo_trainer.models.gpt2:build",
                "config": {
                    "vocabulary": WORDS,
                    "positions": max(128, size.length),
                    "width": 512,
                    "heads": 8,
                    "blocks": 9,
                    "learningRate": 1e-3,
                    "warmupSteps": size.twelfth,
                    "weightDecay": 0.1,
                    "data": {"kind": "tokens", "path": str(folder / "train.tokens"), "length": size.length},
                    "evaluation": {"kind": "tokens", "path": str(folder / "validation.tokens")},
                },
            },
            "training": {
                "steps": size.steps,
                "globalBatchSize": size.batch,
                "microBatchSize": 1,
                "seed": 1,
                "maxGradientNorm": 1.0,
                "evaluation": {"everySteps": size.twelfth, "batches": 8},
                "loggers": [{"name": "tensorboard", "type": "TensorBoard"}],
            },
            "topology": {"stages": 4},
            "standby": {"workers": 1},
        },
    }


def documents() -> Iterator[tuple[str, str]]:
    """Yield the path and text of UTF-8 documents with 500 to 200,000 characters, ordered by a hash of their paths."""
    places = [(Path(sysconfig.get_paths()["stdlib"]), (".py",)), (Path("/usr/share/doc"), (".gz", ".txt", ".md", ""))]
    places.append((Path("/usr/share/man"), (".gz",)))
    found = [
        file
        for folder, suffixes in places
        for file in folder.rglob("*")
        if file.suffix in suffixes and not HIDDEN & set(file.parts) and file.is_file() and not file.is_symlink()
    ]
    for file in sorted(found, key=lambda file: hashlib.blake2b(str(file).encode()).digest()):
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        if 500 < len(text) < 200_000:
            yield str(file), text


def write_texts(folder: Path) -> None:
    """Write every 20th document to validation.jsonl, and about TEXT_CHARACTERS characters of others to train.jsonl."""
    total = {"train": 0, "validation": 0}
    files = {name: (folder / f".{name}.jsonl").open("w") for name in total}
    for number, (name, text) in enumerate(documents()):
        part = "validation" if number % VALIDATION_SHARE == 0 else "train"
        files[part].write(json.dumps({"file": name, "text": text}) + "\n")
        total[part] += len(text)
        if total["train"] > TEXT_CHARACTERS:
            break
    for part, file in files.items():
        file.close()
        (folder / f".{part}.jsonl").rename(folder / f"{part}.jsonl")
        say(f"{part}.jsonl: {total[part] / 1e6:.1f} million characters")


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer, like GPT-2's, on train.jsonl, and write tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = (folder / "train.jsonl").read_text().splitlines()
    tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def prepare(folder: Path, size: Size) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "train.jsonl").exists():
        write_texts(folder)
    if not (folder / "tokenizer.json").exists():
        say("training a tokenizer")
        write_tokenizer(folder)
    for part in ("train", "validation"):
        if not (folder / f"{part}.tokens").exists():
            texts, tokens = str(folder / f"{part}.jsonl"), str(folder / f"{part}.tokens")
            flags = ["--tokenizer", str(folder / "tokenizer.json"), "--end", END]
            subprocess.run([*bamboo("tokenize", texts, "-o", tokens), *flags], check=True)
    file, text = folder / "job.yaml", yaml.safe_dump(job(folder, size), sort_keys=False)
    if file.exists() and file.read_text() != text and any((folder / f"{name}.json").exists() for name in RUNS):
        sys.exit(f"{folder} has a run of another size: remove {', '.join(f'{name}*' for name in RUNS)} there first")
    file.write_text(text)


def bamboo(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "bamboo", *arguments]


def train(folder: Path, size: Size) -> None:
    """Run the trainings that have no result yet, in parallel, and print progress every 30 s; exit if one fails."""
    running = {}
    kills = [f"at:{step}:{stage}" for step, stage in size.kills]
    for name, losses in zip(RUNS, ([], kills), strict=True):
        if (folder / f"{name}.json").exists():
            continue
        command = bamboo("run", str(folder / "job.yaml"), "--json", "--heartbeat-timeout", "60")
        command += ["--output", str(folder / name), *(part for loss in losses for part in ("--preempt", loss))]
        with (folder / f".{name}.json").open("w") as out:
            running[name] = subprocess.Popen(command, stdout=out)
    began = time.monotonic()
    try:
        while any(process.poll() is None for process in running.values()):
            time.sleep(30)
            done = ", ".join(f"{name} {len(steps(folder, name))} of {size.steps} steps" for name in running)
            say(f"{time.monotonic() - began:.0f} s: {done}")
    finally:
        for process in running.values():
            process.terminate()
            process.wait()
    for name, process in running.items():
        if process.returncode:
            sys.exit(f"the {name} run ended with exit code {process.returncode}")
        (folder / f".{name}.json").rename(folder / f"{name}.json")


def steps(folder: Path, name: str) -> list[StepRecord]:
    try:
        return curve(merged(find(str(folder / name)).read_all()))
    except ValueError:
        return []  # nothing is written yet


def evaluations(folder: Path, name: str) -> list[tuple[int, float]]:
    records = newest(merged(find(str(folder / name)).read_all()))
    found = [(r.step, r.metrics.get("loss")) for r in records if isinstance(r, EvaluationRecord)]
    return [(step, loss) for step, loss in found if loss is not None]


def digest(summary: dict[str, Any]) -> str:
    from bamboo_core.control.digests import add_digests

    return add_digests(summary["digests"])


def report(folder: Path) -> None:
    summaries = {name: json.loads((folder / f"{name}.json").read_text()) for name in RUNS}
    for name, summary in summaries.items():
        records = steps(folder, name)
        say(
            f"{name}: {summary['committed']} steps in {summary['seconds']:.0f} s, loss {records[0].loss} -> "
            f"{records[-1].loss}, evaluation {evaluations(folder, name)[-1][1]}, "
            f"preemptions {summary['preemptions']}, takeovers {len(summary['takeovers'])}, "
            f"restores {summary['restores']}, repeated steps {summary['repeated_steps']}, state {digest(summary)[:16]}"
        )
        pauses = sorted(takeover["pause_ms"] / 1e3 for takeover in summary["takeovers"])
        if pauses:
            say(f"  pauses from {pauses[0]:.1f} to {pauses[-1]:.1f} s, median {pauses[len(pauses) // 2]:.1f} s")
    both = [steps(folder, name) for name in RUNS]
    same = [(a.loss, a.gradient_norm) for a in both[0]] == [(b.loss, b.gradient_norm) for b in both[1]]
    same = same and evaluations(folder, RUNS[0]) == evaluations(folder, RUNS[1])
    say(f"losses, gradient norms and evaluations of all steps are the same numbers: {'yes' if same else 'NO'}")
    if not same or len({digest(summary) for summary in summaries.values()}) > 1:
        sys.exit("the runs differ")


def drawing(folder: Path, size: Size) -> str:
    """Return an SVG with both runs' losses, their evaluations, and the steps at which workers were killed."""
    width, height, left, bottom = 860, 420, 60, 50
    curves = {name: steps(folder, name) for name in RUNS}
    values = [r.loss for r in curves["undisturbed"] if r.loss is not None]
    low, high = int(min(values)), int(max(values)) + 1

    def x(step: float) -> float:
        return left + step / size.steps * (width - left - 15)

    def y(loss: float) -> float:
        return 20 + (high - loss) / (high - low) * (height - bottom - 20)

    parts = [f'<rect width="{width}" height="{height}" fill="white"/>']
    for loss in range(low, high + 1):
        parts.append(f'<path d="M{left} {y(loss):.1f}H{width - 15}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in range(0, size.steps + 1, max(1, size.steps // 6)):
        parts.append(f'<text x="{x(step):.1f}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>')
    for step, stage in size.kills:
        parts.append(f'<path d="M{x(step):.1f} 20V{height - bottom}" stroke="#c33" stroke-dasharray="2 4"/>')
        parts.append(f'<text x="{x(step):.1f}" y="14" text-anchor="middle" fill="#c33">{stage}</text>')
    for name, thick in (("disturbed", 7), ("undisturbed", 1.6)):
        line = " ".join(f"{x(r.step):.1f},{y(r.loss):.1f}" for r in curves[name] if r.loss is not None)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[name]}" stroke-width="{thick}"/>')
    for name, radius in (("disturbed", 6.5), ("undisturbed", 3)):
        parts += [
            f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="{radius}" fill="{COLOURS[name]}"/>'
            for step, loss in evaluations(folder, name)
        ]
    for row, (name, said) in enumerate(
        (("undisturbed", "undisturbed"), ("disturbed", f"with {KILLS} workers killed (behind it)"))
    ):
        top = 50 + 22 * row
        parts.append(f'<path d="M{width - 300} {top}h30" stroke="{COLOURS[name]}" stroke-width="{3 + 4 * row}"/>')
        parts.append(f'<text x="{width - 262}" y="{top + 4}">{said}</text>')
    parts.append(f'<text x="{width - 300}" y="98">dots: loss of the evaluation</text>')
    parts.append(f'<text x="{width - 300}" y="118" fill="#c33">dashed: a kill, and the stage that it hit</text>')
    parts.append(f'<text x="{(left + width) / 2}" y="{height - 10}" text-anchor="middle">step</text>')
    parts.append(f'<text x="18" y="{height / 2}" transform="rotate(-90 18 {height / 2})">loss</text>')
    style = 'font-family="sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {style}>{"".join(parts)}</svg>'


async def draw(folder: Path, size: Size, images: Path) -> None:
    page = folder / "curves.html"
    page.write_text(f'<!doctype html><body style="margin:0">{drawing(folder, size)}</body>')
    board = folder / "tensorboard"
    board.mkdir(exist_ok=True)
    for name in RUNS:
        link = board / name
        if not link.is_symlink():
            link.symlink_to(folder / name / "history" / "gpt" / "tensorboard")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(board), "--port", str(PORT)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        async with browser() as tab:
            await tab.size(860, 420)
            await tab.goto(page.as_uri())
            await tab.screenshot(images / "training-run.png", height=420)
            await tab.size(1280, 860)
            for _ in range(60):
                try:
                    await tab.goto(f"http://127.0.0.1:{PORT}/?darkMode=false#timeseries")
                    break
                except AssertionError:
                    await asyncio.sleep(2)
            await tab.until("document.querySelectorAll('scalar-card svg').length >= 3", 120)
            await asyncio.sleep(15)
            await tab.screenshot(images / "training-run-tensorboard.png", height=860)
    finally:
        server.terminate()
        server.wait()


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT undisturbed, and with a dozen workers killed.")
    parser.add_argument("folder", type=Path)
    for name, default, least in (("steps", 60, 60), ("batch", 4, 4), ("length", 64, 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"by default {default}, at least {least}")
    given = parser.parse_args()
    size, folder = Size(given.steps, given.batch, given.length), given.folder.absolute()
    if size.steps < 60 or size.batch < 4 or size.length < 2:
        parser.error("expected at least 60 steps of 4 samples of 2 tokens")
    if chromium() is None:
        sys.exit(MISSING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends both runs, too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prepare(folder, size)
    train(folder, size)
    report(folder)
    asyncio.run(draw(folder, size, ROOT / "docs" / "images"))


if __name__ == "__main__":
    main()
