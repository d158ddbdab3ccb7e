"""Quotas of API keys: how many requests may be open at once, and how many tokens a minute they may take."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.frontend.client.observer import OpenRequest
from quire.frontend.http.errors import ApiError


@dataclass(slots=True)
class _Bucket:
    """Tokens left, below 0 for a debt, at a time."""

    tokens: float
    time: float


class Quotas:
    """An `Observer` that counts the tokens of each API key's requests; None leaves a quota out.

    Tokens are a bucket that holds those of a minute and fills at an even rate. A prompt is taken from it when it is
    submitted and an answer when it has ended; while nothing is left, new requests are rejected. `clock`: seconds, as
    `time.monotonic()`.
    """

    def __init__(
        self, max_requests: int | None, tokens_per_minute: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_requests = max_requests
        self._tokens_per_minute = tokens_per_minute
        self._clock = clock
        self._num_open: Counter[str] = Counter()
        self._buckets: dict[str, _Bucket] = {}

    @contextmanager
    def admit(self, key: str, retry_after: Callable[[], int]) -> Iterator[None]:
        """Count an HTTP request of a key as open in the body of the `with`. Raises `ApiError` 429 beyond a quota.

        `retry_after` returns the seconds after which one of the key's open requests may have ended.
        """
        most = self._max_requests
        if most is not None and self._num_open[key] >= most:
            raise _over_quota(f"{most} requests of this API key are open, and no more may be at once", retry_after())
        if self._tokens_per_minute is not None:
            self._check_tokens(key, self._tokens_per_minute)
        self._num_open[key] += 1
        try:
            yield
        finally:
            self._num_open[key] -= 1

    def on_submitted(self, request: OpenRequest) -> None:
        """See `Observer`."""
        self._take(request.options.tenant, len(request.prompt.token_ids))

    def on_first_tokens(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`."""

    def on_tokens(self, num_tokens: int, num_together: int, gaps: list[float], timestamp: float) -> None:
        """See `Observer`."""

    def on_finished(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`."""
        self._take(request.options.tenant, request.num_output_tokens)

    def _check_tokens(self, key: str, per_minute: int) -> None:
        bucket = self._bucket(key, per_minute)
        if bucket.tokens <= 0:
            seconds = math.floor(-bucket.tokens * 60 / per_minute) + 1
            raise _over_quota(f"this API key has used up its {per_minute} tokens per minute", seconds)

    def _take(self, key: str, num_tokens: int) -> None:
        if self._tokens_per_minute is not None:
            self._bucket(key, self._tokens_per_minute).tokens -= num_tokens

    def _bucket(self, key: str, per_minute: int) -> _Bucket:
        """Return a key's bucket, filled up to now."""
        now = self._clock()
        bucket = self._buckets.setdefault(key, _Bucket(per_minute, now))
        bucket.tokens = min(per_minute, bucket.tokens + (now - bucket.time) * per_minute / 60)
        bucket.time = now
        return bucket


def _over_quota(message: str, seconds: int) -> ApiError:
    return ApiError(
        429,
        f"{message}; try again in {seconds} s",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(seconds)},
    )
