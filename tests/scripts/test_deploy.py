"""The examples of deployments: who may reach the server, and the time in which open requests may finish."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from quire.frontend.http.args import API_KEY_VARIABLE, ServerArgs
from quire.frontend.ray.options import ApplicationOptions

DEPLOY = Path(__file__).parents[2] / "scripts" / "deploy"
EXAMPLES = ("Dockerfile", "kubernetes.yaml", "quire.service", "serve.yaml")
DRAIN = ServerArgs().shutdown_timeout


def text_of(name: str) -> str:
    return (DEPLOY / name).read_text()


def test_every_example_has_an_api_key() -> None:
    """Each of them may listen on other addresses than this machine's."""
    for name in EXAMPLES:
        assert API_KEY_VARIABLE in text_of(name), name
    runs = re.findall(r"^#\s+docker run .*$", text_of("Dockerfile"), re.MULTILINE)
    assert runs
    assert all(f"-e {API_KEY_VARIABLE} " in run for run in runs)
    assert f"name: {API_KEY_VARIABLE}" in text_of("kubernetes.yaml")


def test_open_requests_have_the_time_to_finish() -> None:
    """What stops a server kills it only after it has drained."""
    patterns = {"Dockerfile": r"docker run --stop-timeout (\d+)", "kubernetes.yaml": r"GracePeriodSeconds: (\d+)"}
    for name, pattern in {**patterns, "quire.service": r"^TimeoutStopSec=(\d+)"}.items():
        seconds = [int(each) for each in re.findall(pattern, text_of(name), re.MULTILINE)]
        assert seconds, name
        assert min(seconds) > DRAIN, name
    runs = re.findall(r"docker run ", text_of("Dockerfile"))
    assert len(runs) == len(re.findall(patterns["Dockerfile"], text_of("Dockerfile")))


def test_a_server_that_was_told_to_stop_has_not_failed() -> None:
    """systemd takes status 143 for a failure unless it is told otherwise."""
    assert "SuccessExitStatus=143\n" in text_of("quire.service")


def test_the_image_of_kubernetes_is_one_that_does_not_change() -> None:
    """A tag `latest` is pulled at each start: from a registry that lacks it, or with whatever it has become."""
    (image,) = re.findall(r"image: (\S+)", text_of("kubernetes.yaml"))
    registry, _, tag = image.rpartition(":")
    assert "/" in registry
    assert re.fullmatch(r"v\d+\.\d+\.\d+", tag)
    assert "imagePullPolicy: IfNotPresent" in text_of("kubernetes.yaml")


def test_the_arguments_of_the_ray_application_are_allowed() -> None:
    (application,) = msgspec.yaml.decode((DEPLOY / "serve.yaml").read_bytes())["applications"]
    assert application["import_path"] == "quire.frontend.ray:build"
    assert ApplicationOptions.parse(application["args"]).ray.max_replicas == 4
