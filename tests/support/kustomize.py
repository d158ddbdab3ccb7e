"""The part of kustomize that scripts/deploy/kustomization.yaml needs, so that tests can render it without kubectl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

Document = dict[str, Any]


def documents(path: Path) -> list[Document]:
    """Return the YAML documents of a file."""
    return documents_of(path.read_text())


def documents_of(text: str) -> list[Document]:
    """Return the YAML documents of a text."""
    return [msgspec.yaml.decode(f"{each}\n") for each in text.split("\n---\n")]


def render(folder: Path) -> list[Document]:
    """Return the objects that `kubectl kustomize FOLDER` prints, in the order of the files.

    Knows `resources`, `namespace`, and as `patches` lists of JSON patches and the deletion of an object. Raises
    `ValueError` for anything else.
    """
    rules = msgspec.yaml.decode((folder / "kustomization.yaml").read_bytes())
    if unknown := rules.keys() - {"apiVersion", "kind", "namespace", "resources", "patches"}:
        raise ValueError(f"kustomization.yaml has {sorted(unknown)}, which tests/support/kustomize.py does not know")
    objects = [document for name in rules["resources"] for document in documents(folder / name)]
    for patch in rules["patches"]:
        objects = _patched(objects, patch.get("target"), msgspec.yaml.decode(patch["patch"]))
    for document in objects:
        document["metadata"]["namespace"] = rules["namespace"]
        for subject in document.get("subjects", []):
            subject["namespace"] = rules["namespace"]
    return objects


def _patched(objects: list[Document], target: Document | None, patch: Any) -> list[Document]:
    if target is None:
        if patch.pop("$patch", None) != "delete":
            raise ValueError("a patch without a target must delete an object")
        target = {"kind": patch["kind"], "name": patch["metadata"]["name"]}
        kept = [each for each in objects if not _is(each, target)]
        if len(kept) != len(objects) - 1:
            raise ValueError(f"no object to delete: {target}")
        return kept
    [chosen] = [each for each in objects if _is(each, target)]
    for step in patch:
        _apply(chosen, step["op"], step["path"], step["value"])
    return objects


def _is(document: Document, target: Document) -> bool:
    return (document["kind"], document["metadata"]["name"]) == (target["kind"], target["name"])


def _apply(document: Any, operation: str, path: str, value: Any) -> None:
    """Apply a step of a JSON patch (RFC 6902), `add` or `replace`."""
    *parents, last = path.removeprefix("/").split("/")
    for name in parents:
        document = document[int(name) if isinstance(document, list) else name]
    match operation, document, last:
        case "add", list(), "-":
            document.append(value)
        case "replace", list(), _:
            document[int(last)] = value
        case ("add", dict(), _) if last not in document:
            document[last] = value
        case ("replace", dict(), _) if last in document:
            document[last] = value
        case _:
            raise ValueError(f"{operation} at {path} is not possible")
