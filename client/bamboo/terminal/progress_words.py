"""How far a job is, in a few words each, wherever it runs. Pure."""

from bamboo_core.text import duration


def progress_words(
    step: int,
    steps: int | str,
    *,
    loss: float | None,
    samples_per_second: float | None,
    eta_seconds: float | None,
    stopped_early: bool = False,
) -> list[str]:
    """Step, loss, speed and time left, each of which is left out if it is not known. steps: what is shown for them."""
    words = [f"step {step}/{steps}", *["stopped early"] * stopped_early]
    if loss is not None:
        words.append(f"loss {loss:.4f}")
    if samples_per_second is not None:
        words.append(f"{samples_per_second:.1f} samples/s")
    if eta_seconds is not None:
        words.append(f"ETA {duration(eta_seconds)}")
    return words
