"""The thread that asks a cloud's metadata endpoint whether this node will be taken away. Never in the worker's way."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import aiohttp

from bamboo_core.complaints import said_by
from bamboo_core.control.client import until_first
from bamboo_trainer.worker import cloud_notices
from bamboo_trainer.worker.cloud_notices import Answer, Cloud, CloudNotice, Unclear, Wanted, Withdrawn, news

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
CONNECT_SECONDS = 2.0
CLOSE_SECONDS = 3.0
TRIES = 3  # failures in a row that are worth a line in the log
ERRORS = (Unclear, aiohttp.ClientError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class PollIntervals:
    """Seconds between an answer and the next question (GCP answers when something changes), and for an answer.

    change: how long GCP is asked to wait for a change. first: for Azure's first answer, which can take two minutes.
    """

    aws: float = 5.0
    azure: float = 2.0
    gcp: float = 1.0
    answer: float = 2.0
    change: float = 60.0
    first: float = 130.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeSource:
    """One question. binding: a notice that comes of it is passed on; else it is only logged."""

    look: Callable[[], Awaitable[CloudNotice | None]]
    interval: float
    binding: bool = True


class Http:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def ask(self, method: str, path: str, headers: Mapping[str, str], seconds: float, **more: Any) -> Answer:
        """Raises one of ERRORS."""
        async with self._session.request(
            method,
            self._url + path,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS),
            allow_redirects=False,
            **more,
        ) as response:
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > MAX_BYTES:
                    raise Unclear(f"{path}: the answer has more than {MAX_BYTES} bytes")
            return Answer(status=response.status, body=body.decode(errors="replace"), headers=response.headers)


class Aws:
    """IMDSv2: every question carries a token, which is asked for anew when it is not accepted any more."""

    def __init__(self, http: Http, pace: PollIntervals, rebalance: bool) -> None:
        self._http, self._pace, self._token = http, pace, ""
        self.sources = (
            NoticeSource(look=self._action, interval=pace.aws),
            NoticeSource(look=self._rebalance, interval=pace.aws, binding=rebalance),
        )

    async def _action(self) -> CloudNotice | None:
        return cloud_notices.aws_action(await self._get(cloud_notices.AWS_ACTION), _now())

    async def _rebalance(self) -> CloudNotice | None:
        return cloud_notices.aws_rebalance(await self._get(cloud_notices.AWS_REBALANCE), _now())

    async def _get(self, path: str) -> Answer:
        for attempt in range(2):
            if not self._token:
                self._token = await self.token()
            used = self._token
            answer = await self._http.ask("GET", path, {cloud_notices.AWS_TOKEN_HEADER: used}, self._pace.answer)
            if answer.status != 401 or attempt:
                break
            if self._token == used:  # else the other question has just got a new one
                self._token = ""
        return answer

    async def token(self) -> str:
        try:
            answer = await self._http.ask(
                "PUT", cloud_notices.AWS_TOKEN, cloud_notices.AWS_TOKEN_ASK, self._pace.answer
            )
        except TimeoutError:
            raise Unclear("no token came in time; from a pod AWS needs a hop limit of 2 or more") from None
        return cloud_notices.aws_token(answer)


class Gcp:
    """Asks once how things are, and from then on to be told of a change."""

    def __init__(self, http: Http, pace: PollIntervals, seconds: float) -> None:
        self._http, self._pace = http, pace
        self._etags: dict[str, str] = {}
        preempted = partial(cloud_notices.gcp_preempted, seconds=seconds)
        self.sources = (
            NoticeSource(look=lambda: self._look(cloud_notices.GCP_PREEMPTED, preempted), interval=pace.gcp),
            NoticeSource(
                look=lambda: self._look(cloud_notices.GCP_MAINTENANCE, cloud_notices.gcp_maintenance), interval=pace.gcp
            ),
        )

    async def _look(self, path: str, read: Callable[[Answer, datetime], CloudNotice | None]) -> CloudNotice | None:
        seconds, change = self._pace.answer, {}
        if etag := self._etags.get(path):
            seconds += self._pace.change
            change = {"wait_for_change": "true", "last_etag": etag, "timeout_sec": f"{self._pace.change:.0f}"}
        answer = await self._http.ask("GET", path, cloud_notices.GCP_FLAVOR, seconds, params=change)
        notice = read(answer, _now())
        self._etags[path] = answer.headers.get("ETag", "")
        return notice

    async def present(self) -> bool:
        return cloud_notices.is_gcp(
            await self._http.ask("GET", cloud_notices.GCP_ROOT, cloud_notices.GCP_FLAVOR, self._pace.answer)
        )


class Azure:
    def __init__(self, http: Http, pace: PollIntervals) -> None:
        self._http, self._pace = http, pace
        self._node = ""
        self._seconds = pace.first
        self._events: tuple[str, ...] = ()
        self.sources = (NoticeSource(look=self._look, interval=pace.azure),)

    async def name(self) -> str:
        answer = await self._http.ask("GET", cloud_notices.AZURE_NAME, cloud_notices.AZURE_ASK, self._pace.answer)
        return cloud_notices.azure_name(answer)

    async def _look(self) -> CloudNotice | None:
        self._node = self._node or await self.name()
        answer = await self._http.ask("GET", cloud_notices.AZURE_EVENTS, cloud_notices.AZURE_ASK, self._seconds)
        notice = cloud_notices.azure_events(answer, self._node, _now())
        self._seconds = self._pace.answer
        self._events = notice.events if notice else ()
        return notice

    async def acknowledge(self) -> None:
        """Azure need not wait for this node any more."""
        if self._events:
            body = cloud_notices.azure_acknowledgement(self._events)
            headers = {**cloud_notices.AZURE_ASK, "Content-Type": "application/json"}
            answer = await self._http.ask("POST", cloud_notices.AZURE_EVENTS, headers, self._pace.answer, data=body)
            logger.info("acknowledged %s to Azure, which answers %d", ", ".join(self._events), answer.status)


class Watcher:
    """deliver: gets every binding notice, in this object's own thread; it must neither block nor raise."""

    def __init__(
        self, wanted: Wanted, deliver: Callable[[CloudNotice], None], pace: PollIntervals | None = None
    ) -> None:
        self._wanted, self._deliver, self._pace = wanted, deliver, pace or PollIntervals()
        self._complained = False
        self._azure: Azure | None = None
        self._lock = threading.Lock()  # over the three below
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._left = False
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="bamboo-metadata", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, left: bool = False) -> None:
        """left: the worker has handed over all it had. Takes a few seconds at most; may be called twice."""
        with self._lock:
            self._closed, self._left = True, self._left or left
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.is_alive():
            self._thread.join(timeout=CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except Exception:
            logger.exception("the metadata endpoint is not watched any more")

    async def _watch(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._loop = asyncio.get_running_loop()
        try:
            async with aiohttp.ClientSession() as session:
                await until_first(self._ask(Http(session, self._wanted.url)), self._stop.wait())
                if self._left and self._wanted.acknowledge and self._azure:
                    await self._azure.acknowledge()
        except ERRORS as error:
            logger.warning("Azure's event is not acknowledged: %s", said_by(error))
        finally:
            with self._lock:
                self._loop = None

    async def _ask(self, http: Http) -> None:
        """Until cancelled, or at once if no cloud is there to be asked."""
        cloud = self._wanted.cloud or await self._find(http)
        if cloud is None:
            logger.warning("no cloud's metadata endpoint answers, so none is watched for notices")
            return
        logger.info("watching the metadata endpoint of %s for notices", cloud)
        if cloud is Cloud.AZURE:
            self._azure = Azure(http, self._pace)
            sources: tuple[NoticeSource, ...] = self._azure.sources
        elif cloud is Cloud.GCP:
            sources = Gcp(http, self._pace, self._wanted.gcp_seconds).sources
        else:
            sources = Aws(http, self._pace, self._wanted.rebalance).sources
        await until_first(*(self._follow(source) for source in sources))

    async def _find(self, http: Http) -> Cloud | None:
        """Asks each of them once."""
        asked: dict[Cloud, Awaitable[object]] = {
            Cloud.AWS: Aws(http, self._pace, False).token(),
            Cloud.GCP: Gcp(http, self._pace, self._wanted.gcp_seconds).present(),
            Cloud.AZURE: Azure(http, self._pace).name(),
        }
        answers = await asyncio.gather(*asked.values(), return_exceptions=True)
        found = (cloud for cloud, a in zip(asked, answers, strict=True) if a and not isinstance(a, BaseException))
        return next(found, None)

    async def _follow(self, source: NoticeSource) -> None:
        known: CloudNotice | None = None
        failures = 0
        while True:
            try:
                found = await source.look()
            except ERRORS as error:
                failures += 1
                if failures == TRIES:
                    self._complain(error)
            else:
                failures = 0
                self._tell(source, news(known, found))
                known = found
            await asyncio.sleep(source.interval)

    def _tell(self, source: NoticeSource, told: CloudNotice | Withdrawn | None) -> None:
        match told:
            case CloudNotice():
                more = f"about {told.seconds:.0f} s are left" if source.binding else "which is not acted upon"
                logger.warning("%s: this node %s; %s", told.source, told.message, more)
                if source.binding:
                    self._deliver(told)
            case Withdrawn(notice):
                logger.warning("%s is withdrawn; a worker that has begun to leave still leaves", notice.source)

    def _complain(self, error: Exception) -> None:
        """Once: it may go on for as long as the job."""
        if not self._complained:
            self._complained = True
            logger.warning(
                "the metadata endpoint does not say whether this node stays; it will be asked again: %s", said_by(error)
            )


def _now() -> datetime:
    return datetime.now(UTC)
