"""The conversation before a response, from the store, and the items that a response adds to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.frontend.http.conversation import arguments_object
from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.openai.responses import response as wire
from quire.frontend.http.response_database import StoredItem, StoredResponse
from quire.frontend.http.response_store import ResponseStore
from quire.frontend.http.transport.bodies import MAX_ITEMS
from quire.frontend.http.transport.responses import new_id
from quire.frontend.http.transport.value_counts import has_few_values

_ID = re.compile(r"resp_[!-~]{1,128}")
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "mcp_call": "mcp",
    "web_search_call": "ws",
    "reasoning": "rs",
}
_PREVIOUS = "previous_response_id"


class _Status(msgspec.Struct):
    status: str


class _Id(msgspec.Struct):
    id: str


def is_id(given: str) -> bool:
    """Return whether a text can be the id of a response."""
    return _ID.fullmatch(given) is not None


async def conversation_before(store: ResponseStore, key: str, previous_id: str, max_bytes: int) -> Sequence[StoredItem]:
    """Return the conversation up to and with a response, which may have `max_bytes`. Raises `ApiError` 400 or 503."""
    found = await store.get(key, previous_id) if is_id(previous_id) else None
    if found is None:
        raise bad_request(
            f"previous_response_id={previous_id!r} is not among the stored responses of this API key: it may have been "
            "deleted, be too old, or have been made with store=false; send the whole conversation as input",
            _PREVIOUS,
            "previous_response_not_found",
        )
    if msgspec.json.decode(found.response, type=_Status).status == "failed":
        raise bad_request(
            f"previous_response_id={previous_id!r} names a response that failed; go on from the one before it",
            _PREVIOUS,
        )
    items = [*found.input, *found.output]
    size = sum(len(each.item) for each in items)
    if len(items) > MAX_ITEMS or size > max_bytes or not has_few_values(b"".join(each.item for each in items)):
        raise bad_request(
            f"previous_response_id={previous_id!r} names a conversation of {len(items)} items and {size} bytes, and it "
            f"may have {MAX_ITEMS} items, {max_bytes} bytes (--max-body-bytes), and the values of a body; begin a new "
            "one",
            _PREVIOUS,
        )
    return items


def decoded(items: Sequence[StoredItem]) -> list[dict[str, Any]]:
    """Return stored items as an input has them."""
    found = msgspec.json.decode(b"[" + b",".join(each.item for each in items) + b"]", type=list[dict[str, Any]])
    for item in found:
        if item["type"] == "function_call":  # the model may have written arguments that are no JSON
            item["arguments"] = msgspec.json.encode(arguments_object(item["arguments"])).decode()
    return found


def input_items(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a checked `input` as items in the form of OpenAI's list of input items: typed, with ids."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_completed(item) for item in given]


def _completed(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    made = {**item, "type": kind, "id": _id_of(item) or new_id(_PREFIXES.get(kind, "item"), "_")}
    if kind == "reasoning":
        return {**made, "summary": item.get("summary") or []}
    if kind == "message" and isinstance(item["content"], str):
        text = {"text": item["content"]}
        is_answer = item["role"] == "assistant"
        part = {"type": "output_text", **text, "annotations": []} if is_answer else {"type": "input_text", **text}
        made["content"] = [part]
    return {**made, "status": item.get("status") or "completed"}


def _id_of(item: Mapping[str, Any]) -> str | None:
    given = item.get("id")
    return given if isinstance(given, str) else None


@dataclass(frozen=True, slots=True)
class Keeper:
    """Stores one response after the conversation `before` it, to which `given`, its own input, belongs."""

    store: ResponseStore
    key: str
    before: Sequence[StoredItem]
    given: Sequence[Mapping[str, Any]]

    async def keep(self, response: wire.Response) -> bool:
        """Store a response that has ended; return False if that failed."""
        return await self.store.put(self.key, self._stored(response))

    def keep_later(self, response: wire.Response) -> None:
        """Store a response that has ended otherwise, without waiting for it."""
        self.store.put_later(self.key, self._stored(response))

    def _stored(self, response: wire.Response) -> StoredResponse:
        given = (StoredItem(msgspec.json.encode(each)) for each in self.given)
        output = [StoredItem(msgspec.json.encode(each)) for each in _continuable(response.output)]
        return StoredResponse(response.id, msgspec.json.encode(response), [*self.before, *given], output)


def _continuable(items: Iterable[wire.Item]) -> list[wire.Item]:
    """Return the items that a next turn has: without log probabilities, and calls that were cut off."""
    kept: list[wire.Item] = []
    for item in items:
        if isinstance(item, wire.OutputMessage):
            texts = [
                msgspec.structs.replace(part, logprobs=[]) for part in item.content if isinstance(part, wire.OutputText)
            ]
            kept.append(msgspec.structs.replace(item, content=texts))
        elif not (isinstance(item, wire.FunctionCall) and item.status != "completed"):
            kept.append(item)
    return kept


class InputItems(msgspec.Struct):
    """A page of the items from which a response was made: the whole conversation before it."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class DeletedResponse(msgspec.Struct):
    """A response that is no longer stored."""

    id: str
    object: str = "response"
    deleted: bool = True


def page_of(items: Sequence[StoredItem], limit: int, order: str, after: str | None) -> InputItems:
    """Return `limit` items in an `order`, "asc" or "desc", after the one with an id. Raises `ApiError` 400."""
    listed = list(items) if order == "asc" else list(reversed(items))
    ids = [msgspec.json.decode(each.item, type=_Id).id for each in listed]
    if after is not None and after not in ids:
        raise bad_request(f"after={after!r} is not the id of an item of this response", "after")
    begin = 0 if after is None else ids.index(after) + 1
    shown = slice(begin, begin + limit)
    data = msgspec.json.decode(b"[" + b",".join(each.item for each in listed[shown]) + b"]")
    first, last = (ids[shown][0], ids[shown][-1]) if data else (None, None)
    return InputItems(data, first, last, has_more=len(listed) > begin + limit)


def not_found(response_id: str) -> ApiError:
    """Return the error for an unknown id."""
    return ApiError(
        404,
        f"there is no response {response_id!r} with this API key: it may have been deleted, be too old, have been made "
        "with store=false, or not have ended yet",
        code="response_not_found",
        param="response_id",
    )
