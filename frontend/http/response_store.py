"""The store of responses as the server uses it: a database on a thread of its own, off the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from quire.frontend.http.args import ENTRY_BODIES, ServerArgs
from quire.frontend.http.errors import ApiError
from quire.frontend.http.response_database import ResponseDatabase, StoredResponse
from quire.frontend.http.response_file import StoreError
from quire.protocol.options import parse_size

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ResponseStore:
    """Runs a database on one thread, in the order of the calls: what has been put is there for the next `get`.

    Methods raise `ApiError` 503 if the database fails. `tenant`: the API key's name, see `Caller`.
    """

    def __init__(self, database: ResponseDatabase) -> None:
        self._database = database
        self._thread = ThreadPoolExecutor(1, "quire-response-store")

    async def put(self, tenant: str, stored: StoredResponse) -> bool:
        """Store a response; return False if that failed, which the log then explains."""
        return await asyncio.wrap_future(self._thread.submit(self._put, tenant, stored))

    def put_later(self, tenant: str, stored: StoredResponse) -> Future[bool]:
        """Store a response without waiting for it."""
        return self._thread.submit(self._put, tenant, stored)

    async def response(self, tenant: str, response_id: str) -> bytes | None:
        """Return a response as JSON; None if there is none."""
        return await self._run(lambda: self._database.response(tenant, response_id))

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response with its conversation; None if there is none."""
        return await self._run(lambda: self._database.get(tenant, response_id))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; return False if there is none."""
        return await self._run(lambda: self._database.delete(tenant, response_id))

    def close(self) -> None:
        """Finish what has been put, and close the file."""
        self._thread.shutdown()
        self._database.close()

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.wrap_future(self._thread.submit(call))
        except StoreError as error:
            logger.warning("the response store failed: %s", error)
            raise ApiError(
                503, f"the response store failed: {error}; try again, or send the whole conversation as input"
            ) from None

    def _put(self, tenant: str, stored: StoredResponse) -> bool:
        try:
            self._database.put(tenant, stored)
        except StoreError as error:
            logger.warning("a response could not be stored: %s", error)
            return False
        return True


@contextmanager
def response_store(args: ServerArgs) -> Iterator[ResponseStore | None]:
    """Open the store, if one is asked for. Raises `ValueError` for a file that can't be used."""
    if args.response_store is None:
        yield None
        return
    database = ResponseDatabase(
        args.response_store,
        max_entries=args.response_store_entries,
        max_bytes=parse_size(str(args.response_store_size)),
        max_entry_bytes=ENTRY_BODIES * args.max_body_bytes,
        max_days=args.response_store_days,
    )
    store = ResponseStore(database)
    try:
        yield store
    finally:
        store.close()
