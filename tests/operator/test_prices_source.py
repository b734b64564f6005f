"""Prices that are read anew from a file or a URL: a real server answers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from bamboo_operator.prices.source import PriceAddress, PriceSource

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def listed(spot: float) -> str:
    return f"format: bamboo-prices\nversion: 1\nsource: test\nmachines: {{m: {{spot: {spot}}}}}\n"


def spot(source: PriceSource) -> float | None:
    return source.current.machines["m"].spot if source.current else None


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_a_file_is_read_again_and_bad_prices_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "prices.yaml"
    source = PriceSource(PriceAddress.parse(str(file), 60.0))
    await source.read()
    assert source.current is None
    assert source.age is None
    file.write_text(listed(0.5))
    await source.read()
    assert spot(source) == 0.5
    for bad in (listed(-1), "machines: {", listed(1) + "other: 1\n", "x" * (1 << 21), ""):
        file.write_text(bad)
        caplog.clear()
        for _ in range(3):
            await source.read()
        assert spot(source) == 0.5
        (told,) = warned(caplog)
        assert told.startswith(f"no new prices: {file}")
        assert told.endswith("; those of before stay in force")
    file.write_text(listed(0.7))
    await source.read()
    assert spot(source) == 0.7
    assert source.age is not None


async def test_the_lists_that_come_along_may_be_named() -> None:
    source = PriceSource(PriceAddress.parse("2026-11", 60.0))
    await source.read()
    assert source.current is not None
    assert source.current.machines["g5.xlarge"].spot > 0


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/prices.yaml?token=hidden"
    finally:
        await runner.cleanup()


async def test_a_url_is_read_again_within_bounds(caplog: pytest.LogCaptureFixture) -> None:
    what = ["good"]

    async def answer(request: web.Request) -> web.StreamResponse:
        match what[0]:
            case "good":
                return web.Response(text=listed(0.5))
            case "missing":
                return web.Response(status=404)
            case "large":
                return web.Response(body=b"x" * (3 << 20))
            case "binary":
                return web.Response(body=b"\xff\xfe\x00")
            case "slow":
                await asyncio.sleep(2.0)
            case "in circles":
                raise web.HTTPFound(request.path)
        return web.Response(text="nonsense")

    async with serving(answer) as url:
        source = PriceSource(PriceAddress.parse(url, 60.0), timeout=0.5)
        await source.read()
        assert spot(source) == 0.5
        for bad in ("missing", "large", "binary", "slow", "in circles", "nonsense"):
            what[0] = bad
            caplog.clear()
            await source.read()
            await source.read()
            assert spot(source) == 0.5, bad
            (told,) = warned(caplog)
            assert told.startswith("no new prices: http://127.0.0.1:"), (bad, told)
            assert "hidden" not in told
    caplog.clear()
    await source.read()
    assert len(warned(caplog)) == 1, "there is no server any more"
    assert spot(source) == 0.5


async def test_it_is_read_from_time_to_time_until_it_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(listed(0.5))
    source = PriceSource(PriceAddress.parse(str(file), 0.01))
    await source.first_read(0.01)  # nobody reads yet
    reading = asyncio.create_task(source.run())
    try:
        async with asyncio.timeout(10.0):
            await source.first_read(10.0)
            assert spot(source) == 0.5
            file.write_text(listed(0.6))
            while spot(source) != 0.6:
                await asyncio.sleep(0.01)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await PriceSource().run()  # nobody tells any, and it ends at once
    await PriceSource().first_read(10.0)


@pytest.mark.parametrize("text", ["ftp://host/prices", "https:///prices", "s3://bucket/prices"])
def test_other_places_are_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected a file, or a URL such as https://HOST/prices.yaml, got "):
        PriceAddress.parse(text, 60.0)
