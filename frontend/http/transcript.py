"""A conversation put together from pieces, for APIs that have no messages of Chat Completions."""

from __future__ import annotations

from typing import Any


class Transcript:
    """`messages` are those of Chat Completions. What the assistant thinks, says and calls in a row is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._calls: set[str] = set()  # by id

    def say(self, role: str, text: str, merge: bool = False) -> None:
        """Add what `role` says. `merge`: it goes on with its last message, as the assistant always does."""
        if self._goes_on(role) and (merge or role == "assistant"):
            last = self.messages[-1]
            last["content"] = f"{last['content']}\n{text}" if last["content"] else text
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """Add what the assistant thought before what follows."""
        message = self._assistant()
        before = message.get("reasoning_content")
        message["reasoning_content"] = f"{before}\n{text}" if before else text

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """Add a call of the assistant's; `arguments` is an object, or the JSON text of one."""
        function = {"name": name, "arguments": arguments}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        self._calls.add(call_id)

    def knows_call(self, call_id: str) -> bool:
        """Whether the assistant made this call."""
        return call_id in self._calls

    def result(self, call_id: str, text: str) -> None:
        """Add what a call gave."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _goes_on(self, role: str) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == role

    def _assistant(self) -> dict[str, Any]:
        """The assistant's message that is being put together."""
        if not self._goes_on("assistant"):
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]
