"""The row of another server's API in the registry: its routes, its errors and what its paths are known by."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.routing import Route

from quire.frontend.http.errors import ApiError
from quire.frontend.http.models.served_models import ServedModels

ErrorBody = Callable[[ApiError, str], msgspec.Struct]


@dataclass(frozen=True, kw_only=True)
class ApiDialect:
    """The API of another server.

    `name`: whose API it is, in texts. `routes`: makes its routes. `paths`: matches the paths, without the root path,
    whose errors have a shape of their own, which `error_body` makes of an error and the request's id; elsewhere errors
    have OpenAI's. `id_header`: a further header for the request's id in responses at these paths. `prompt_fields`: the
    field that holds the prompt, by the path of the route, where it is not called `prompt`.
    """

    name: str
    routes: Callable[[ServedModels], Sequence[Route]]
    paths: re.Pattern[str] | None = None
    error_body: ErrorBody | None = None
    id_header: str | None = None
    prompt_fields: Mapping[str, str] = field(default_factory=dict)
