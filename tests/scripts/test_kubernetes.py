"""The objects of scripts/deploy for Kubernetes: fields, references between them, and that they fit the server.

No cluster is needed. Custom resources are checked against `gateway_schemas`, all others against Kubernetes' own schemas
where the extra `kubernetes` is installed.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import typer
from gateway_schemas import CUSTOM_RESOURCES, PICKER_CONFIG
from kustomize import Document, documents, documents_of, render

from quire.frontend.cli.app import app
from quire.frontend.http.args import ServerArgs

DEPLOY = Path(__file__).parents[2] / "scripts" / "deploy"
OBJECTS = render(DEPLOY)
FREE = {"annotations", "data", "labels", "limits", "matchLabels", "requests"}
"""Fields with keys that anyone may choose."""

Check = Callable[[Any], None]


def kinds(objects: list[Document]) -> list[str]:
    return [f"{each['kind']}-{each['metadata']['name']}" for each in objects]


def is_custom(document: Document) -> bool:
    return (document["apiVersion"], document["kind"]) in CUSTOM_RESOURCES


CUSTOM = [each for each in OBJECTS if is_custom(each)]
BUILT_IN = [each for each in OBJECTS if not is_custom(each)] + documents(DEPLOY / "kubernetes.yaml")


def check_custom(document: Document) -> None:
    jsonschema.validate(document, CUSTOM_RESOURCES[document["apiVersion"], document["kind"]])


def check_built_in(document: Document) -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="Kubernetes' schemas are not installed; `pip install '.[kubernetes]'` brings them"
    )
    validator.validate(document, validator.latest_version(), strict=True)


def fields(node: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each field below `node`, as an object and a key. Keys that anyone may choose are none."""
    if isinstance(node, list):
        for each in node:
            yield from fields(each)
    elif isinstance(node, dict):
        for key, value in list(node.items()):
            yield node, key
            is_free = key in FREE or (key == "selector" and "matchLabels" not in value)
            if not is_free:
                yield from fields(value)


def assert_that_misspelled_fields_are_found(document: Document, check: Check) -> None:
    changed = copy.deepcopy(document)
    for node, key in list(fields(changed)):
        if node is changed and key in {"apiVersion", "kind"}:  # these choose the schema
            continue
        node[f"{key}s"] = node.pop(key)
        with pytest.raises(Exception, match=key) as failure:
            check(changed)
        assert "ValidationError" in type(failure.value).__name__
        node[key] = node.pop(f"{key}s")
    assert changed == document


@pytest.mark.parametrize("document", CUSTOM, ids=kinds(CUSTOM))
def test_custom_resources_have_the_fields_of_their_definitions(document: Document) -> None:
    check_custom(document)
    assert_that_misspelled_fields_are_found(document, check_custom)


@pytest.mark.parametrize("document", BUILT_IN, ids=kinds(BUILT_IN))
def test_objects_have_the_fields_of_their_kinds(document: Document) -> None:
    check_built_in(document)
    assert_that_misspelled_fields_are_found(document, check_built_in)


def test_kubectl_renders_the_same() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    command = [kubectl, "kustomize", str(DEPLOY)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert sorted(documents_of(text), key=str) == sorted(OBJECTS, key=str)


def only(kind: str, name: str = "quire-picker") -> Document:
    [found] = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod(name: str) -> Document:
    """Return the pods' template of a deployment."""
    template: Document = only("Deployment", name)["spec"]["template"]
    return template


def container(name: str) -> Document:
    [single] = pod(name)["spec"]["containers"]
    assert isinstance(single, dict)
    return single


def test_the_route_leads_through_the_picker_to_the_replicas() -> None:
    route, pool, service = only("HTTPRoute", "quire"), only("InferencePool", "quire"), only("Service")
    [rule] = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "quire"}]
    assert pool["spec"]["selector"]["matchLabels"].items() <= pod("quire")["metadata"]["labels"].items()
    [target], [port] = pool["spec"]["targetPorts"], container("quire")["ports"]
    assert target["number"] == port["containerPort"]
    picker = pool["spec"]["endpointPickerRef"]
    [offered] = service["spec"]["ports"]
    assert (picker["name"], picker["port"]["number"]) == (service["metadata"]["name"], offered["port"])
    assert service["spec"]["selector"].items() <= pod("quire-picker")["metadata"]["labels"].items()
    assert offered["targetPort"] in {each["name"] for each in container("quire-picker")["ports"]}
    assert only("Deployment", "quire")["spec"]["replicas"] > 1


def test_metrics_are_open_within_the_cluster_alone() -> None:
    """The picker has no API key, and the route leads to paths of the API only, which need one."""
    [rule] = only("HTTPRoute", "quire")["spec"]["rules"]
    assert [match["path"] for match in rule["matches"]] == [{"type": "PathPrefix", "value": "/v1"}]


def test_the_picker_may_read_what_it_watches_and_knows_its_plugins() -> None:
    binding, account = only("RoleBinding"), only("ServiceAccount")
    assert binding["roleRef"]["name"] == only("Role")["metadata"]["name"]
    [subject] = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (account["metadata"]["name"], account["metadata"]["namespace"])
    assert pod("quire-picker")["spec"]["serviceAccountName"] == account["metadata"]["name"]
    readable = {name for rule in only("Role")["rules"] for name in rule["resources"] if "watch" in rule["verbs"]}
    assert readable == {"pods", "inferencepools", "inferenceobjectives", "inferencemodelrewrites"}
    flags = dict(each.removeprefix("--").split("=") for each in container("quire-picker")["args"])
    assert flags["pool-name"] == only("InferencePool", "quire")["metadata"]["name"]
    [mount], [volume] = container("quire-picker")["volumeMounts"], pod("quire-picker")["spec"]["volumes"]
    assert (mount["name"], volume["configMap"]["name"]) == (volume["name"], only("ConfigMap")["metadata"]["name"])
    name = flags["config-file"].removeprefix(f"{mount['mountPath']}/")
    config = msgspec.yaml.decode(only("ConfigMap")["data"][name])
    jsonschema.validate(config, PICKER_CONFIG)
    [profile] = config["schedulingProfiles"]
    assert {each["pluginRef"] for each in profile["plugins"]} == {each["type"] for each in config["plugins"]}


def test_the_replicas_have_flags_that_the_server_knows() -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    context = serve.make_context("serve", list(container("quire")["args"]))
    assert context.params["metrics_prefix"] == "vllm"
    assert context.params["metrics_without_key"] is True
    with pytest.raises(Exception, match=r"(?i)no such option"):
        serve.make_context("serve", ["--metrics-without-keys"])


def test_replicas_have_the_time_to_finish_and_nothing_in_common() -> None:
    spec = pod("quire")["spec"]
    asleep = float(container("quire")["lifecycle"]["preStop"]["exec"]["command"][1])
    assert asleep + ServerArgs().shutdown_timeout < spec["terminationGracePeriodSeconds"]
    assert pod("quire-picker")["spec"]["terminationGracePeriodSeconds"] >= spec["terminationGracePeriodSeconds"]
    assert not [each for each in OBJECTS if each["kind"] == "PersistentVolumeClaim"]
    assert [sorted(each) for each in spec["volumes"]] == [["ephemeral", "name"]]
