"""Random grammars of parts that contradict each other, of which llguidance may force texts without end."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from quire.protocol.messages import StructuredOutputs

_TEXTS = ("a", "b", "xy", "ab", "aab", "0", "a0", "zzz")
_CLASSES = ("[ab]", "[a-a]", "[aa]", "[a0]", r"\d", "[^a]", "[^ab]", ".", r"(.|\n)", r"[^\W]", "[a-z]")
_TIMES = ("*", "+", "?", "{2}", "{2,}", "{0,3}", "{40}", "{1,900}", "{0,9000}")
_DEEPEST = 3


def random_grammar(random: Random) -> StructuredOutputs:
    """Return a regular expression, a JSON schema or a Lark grammar."""
    kind = random.random()
    if kind < 0.3:
        return StructuredOutputs(regex="[qr]" + _regex(random, 0) + _regex(random, 0))
    if kind < 0.45:
        return StructuredOutputs(json=_schema(random, 0), disable_any_whitespace=random.random() < 0.7)
    names = [f"r{number}" for number in range(random.randint(1, 3))] + ["T"]
    rules = [f"start: {random.choice(['/[qr]/', chr(34) + 'q' + chr(34)])} {_rule(random, names, 0)}"]
    rules += [f"{name}: {_rule(random, names[number + 1 :], 0)}" for number, name in enumerate(names[:-1])]
    rules.append(f"T: /{_regex(random, 0)}/ {random.choice(['', f'/{_regex(random, 1)}/'])}")
    if random.random() < 0.3:
        rules[0] += random.choice([" lazy", " (lazy)*", " lazy{3}"])
        rules += [f"lazy[lazy]: TEXT {json.dumps(random.choice(_TEXTS))}", r"TEXT: /(.|\n)*/"]
    return StructuredOutputs(grammar="\n".join(rules))


def _regex(random: Random, depth: int) -> str:
    kind = random.random()
    if depth == _DEEPEST or kind < 0.35:
        return random.choice((*_TEXTS, *_CLASSES))
    parts = [_regex(random, depth + 1) for _ in range(random.randint(1, 3))]
    if kind < 0.6:
        return "".join(parts)
    return f"({'|'.join(parts)})" if kind < 0.75 else f"(?:{parts[0]}){random.choice(_TIMES)}"


def _rule(random: Random, names: list[str], depth: int) -> str:
    kind = random.random()
    if depth == _DEEPEST or kind < 0.3:
        return random.choice([json.dumps(random.choice(_TEXTS)), f"/{_regex(random, 1)}/", *names, *names])
    if kind < 0.36:
        options = {"whitespace_flexible": random.random() < 0.3}
        return "%json " + json.dumps({**_schema(random, 1), "x-guidance": options})
    parts = [_rule(random, names, depth + 1) for _ in range(random.randint(1, 3))]
    if kind < 0.6:
        return " ".join(parts)
    return f"({' | '.join(parts)})" if kind < 0.75 else f"({parts[0]}){random.choice(_TIMES)}"


def _schema(random: Random, depth: int) -> dict[str, Any]:
    kind = random.random()
    if depth == _DEEPEST or kind < 0.4:
        return random.choice([
            {"const": "a" * random.choice([1, 5, 300])},
            {"type": "string", "maxLength": random.choice([0, 1, 50])},
            {"enum": random.choice([["a"], ["a", "ab"], ["a", 1]])},
            {"type": "integer", "minimum": 3, "maximum": random.choice([3, 4, 900])},
            {"type": random.choice(["boolean", "null", "string"])},
            {"type": "string", "pattern": f"^{_regex(random, 1)}$"},
            {"type": "string", "format": "date"},
        ])  # fmt: skip
    if kind < 0.6:
        most = {"maxItems": 90} if random.random() < 0.5 else {}
        return {"type": "array", "items": _schema(random, depth + 1), "minItems": random.choice([0, 1, 90]), **most}
    if kind < 0.7:
        parts = [_schema(random, depth + 1) for _ in range(random.randint(1, 2))]
        return {random.choice(["anyOf", "oneOf", "allOf"]): parts}
    properties = {key * random.choice([1, 30]): _schema(random, depth + 1) for key in "kl"[: random.randint(0, 2)]}
    return {
        "type": "object",
        "properties": properties,
        "required": [key for key in properties if random.random() < 0.6],
        "additionalProperties": random.choice([False, True, {"const": "q" * 200}]),
    }
