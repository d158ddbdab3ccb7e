"""The pooling tasks of vLLM: what is asked of a prompt's vector, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from quire.protocol.messages import PoolingParams
from quire.protocol.pooling_info import PoolingInfo

PoolingTask = Literal["embed", "classify"]

_ONE_VECTOR = "a prompt has one vector here, and not one for each of its tokens"
_REFUSED = {
    "token_embed": _ONE_VECTOR,
    "token_classify": _ONE_VECTOR,
    "score": "pairs are scored by score",
    "plugin": "there are no plugins of pooling",
}


def task_of(name: str | None, params: Sequence[PoolingParams], model: PoolingInfo) -> PoolingTask:
    """Return the task of this name, or else that of the parameters, or what the model does. Raises `ValueError`."""
    if name is None:
        tasks = {each.task for each in params}
        if len(tasks) > 1:
            raise ValueError(f"the pooling_params have the tasks {', '.join(sorted(tasks))}; make a call for each task")
        name = next((task for task in tasks if task != "embed"), None)  # which is the default
    if name is None:
        return "embed" if model.embeds else "classify"
    if name == "embed":
        return "embed"
    if name == "classify":
        return "classify"
    reason = f": {_REFUSED[name]}" if name in _REFUSED else ""
    raise ValueError(f"pooling_task={name!r} is not possible{reason}; it must be 'embed' or 'classify'")


def reward_params(params: PoolingParams, model: PoolingInfo) -> PoolingParams:
    """Return the parameters of a reward: the logit of the only label, unless they ask for an activation.

    Raises `ValueError` for a model with several labels or none.
    """
    if len(model.labels) != 1:
        raise ValueError(
            f"this model gives no rewards; it {model.tasks}; load a reward model: a ...ForSequenceClassification of "
            "one label"
        )
    return msgspec.structs.replace(params, task="classify", use_activation=bool(params.use_activation))
