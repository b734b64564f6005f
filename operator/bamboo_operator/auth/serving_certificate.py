"""The operator's serving certificate for workers, reloaded when its files change."""

import asyncio
import logging
import ssl
from asyncio import sslproto
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

POLL_SECONDS = 30.0
BUFFER_BYTES = 16 << 10  # size of a full TLS record


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCertificate:
    """PEM files: the certificate chain, its key, and the authority that workers trust."""

    chain: Path
    key: Path
    authority: Path

    def context(self) -> ssl.SSLContext:
        """Return the server's TLS context. Raises OSError (also ssl.SSLError) if the files are invalid."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.chain, self.key)
        # asyncio gives every connection a buffer of 256 KiB, which would be most of our memory with hundreds of workers
        sslproto.SSLProtocol.max_size = BUFFER_BYTES
        return context

    def trusted(self) -> str:
        """Return the authority's PEM text. Raises OSError or ssl.SSLError if the file holds none."""
        text = self.authority.read_text()
        ssl.create_default_context(cadata=text)
        return text

    async def keep_fresh(self, context: ssl.SSLContext) -> None:
        """Reload the certificate for new connections whenever its files change; run until cancelled."""
        seen = self._stamp()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                if (now := self._stamp()) != seen:
                    context.load_cert_chain(self.chain, self.key)
                    seen = now
                    logger.info("a new certificate is in use")
            except OSError as error:
                logger.warning("cannot load the new certificate: %s", error)

    def _stamp(self) -> tuple[float, float]:
        return self.chain.stat().st_mtime, self.key.stat().st_mtime
