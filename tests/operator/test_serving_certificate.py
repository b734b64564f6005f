"""The certificate that workers are shown."""

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from bamboo_core.control.protocol import Message, Stop
from bamboo_operator.auth.pod_tokens import (
    PodIdentity,
)
from bamboo_operator.auth.serving_certificate import ServingCertificate
from certificates import issue
from gateway_kit import house, talk, token


def certificate(folder: Path) -> ServingCertificate:
    issue(folder)
    return ServingCertificate(chain=folder / "tls.crt", key=folder / "tls.key", authority=folder / "ca.crt")


async def test_workers_talk_over_tls_to_whom_their_authority_vouches_for(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    async with house(files.context()) as place:
        place.server.good[token()] = PodIdentity("team", "job-w0", "u0")
        assert await talk(place, token(), files.trusted()) == [Stop(reason="Test")]


async def test_a_worker_says_nothing_to_somebody_else(tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (mine := tmp_path / "mine").mkdir()
    async with house(certificate(other).context()) as place:
        place.server.good[token()] = PodIdentity("team", "job-w0", "u0")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await talk(place, token(), certificate(mine).trusted())
        assert (place.server.asked, place.events) == (0, [])


async def test_a_new_certificate_in_the_same_files_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo_operator.auth.serving_certificate.POLL_SECONDS", 0.05)
    files = certificate(tmp_path)
    context = files.context()
    fresh = asyncio.create_task(files.keep_fresh(context))
    try:
        async with house(context) as place:
            place.server.good[token()] = PodIdentity("team", "job-w0", "u0")
            renewed = certificate(tmp_path).trusted()
            heard: list[Message] = []

            async def heard_something() -> None:
                while not heard:
                    with contextlib.suppress(TimeoutError):
                        heard.extend(await talk(place, token(), renewed))

            await asyncio.wait_for(heard_something(), 60)
            assert heard == [Stop(reason="Test")]
    finally:
        fresh.cancel()


@pytest.mark.parametrize(("wrong", "read"), [("chain", "context"), ("key", "context"), ("authority", "trusted")])
def test_files_that_hold_no_certificate_are_refused(tmp_path: Path, wrong: str, read: str) -> None:
    files = certificate(tmp_path)
    getattr(files, wrong).write_text("no PEM")
    with pytest.raises(ssl.SSLError):
        getattr(files, read)()
