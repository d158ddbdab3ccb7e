"""Fields of the custom resources in scripts/deploy, as JSON schemas, which allow no other field.

Sources: `api/v1/inferencepool_types.go` of the Gateway API inference extension, `apis/v1/httproute_types.go` of Gateway
API, and the `EndpointPickerConfig` that the extension's endpoint picker reads from a file. Their definitions have more
fields, which examples do not need.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
WORD: Schema = {"type": "string"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
WEIGHT: Schema = {"type": "number", "minimum": 0}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}


def _object(required: Schema, **optional: Schema) -> Schema:
    properties = {**required, **optional}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema, most: int = 16, least: int = 1) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _resource(version: str, kind: str, spec: Schema) -> Schema:
    metadata = _object({"name": TEXT}, namespace=TEXT, labels=LABELS, annotations=LABELS)
    return _object({"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec})


_NUMBERED = _object({"number": PORT})
_REFERENCE = {"group": WORD, "kind": TEXT, "namespace": TEXT, "port": PORT}

_POOL = _object(
    {
        "selector": _object({"matchLabels": LABELS}),
        "targetPorts": _list(_NUMBERED, most=8),
        # A port is required for a Service, which the kind is by default.
        "endpointPickerRef": _object(
            {"name": TEXT, "port": _NUMBERED}, group=WORD, kind=TEXT, failureMode={"enum": ["FailOpen", "FailClose"]}
        ),
    },
    appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
)

_ROUTE = _object(
    {
        "parentRefs": _list(_object({"name": TEXT}, **_REFERENCE, sectionName=TEXT), most=32),
        "rules": _list(
            _object(
                {"backendRefs": _list(_object({"name": TEXT}, **_REFERENCE, weight=WEIGHT))},
                name=TEXT,
                matches=_list(
                    _object(
                        {
                            "path": _object(
                                {
                                    "type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                                    "value": {"type": "string", "pattern": "^/", "maxLength": 1024},
                                }
                            )
                        }
                    ),
                    most=64,
                ),
                timeouts=_object({}, request=DURATION, backendRequest=DURATION),
            )
        ),
    },
    hostnames=_list(TEXT),
)

CUSTOM_RESOURCES: dict[tuple[str, str], Schema] = {
    (schema["properties"]["apiVersion"]["const"], schema["properties"]["kind"]["const"]): schema
    for schema in (
        _resource("inference.networking.k8s.io/v1", "InferencePool", _POOL),
        _resource("gateway.networking.k8s.io/v1", "HTTPRoute", _ROUTE),
    )
}

_PLUGIN = _object({"type": TEXT}, name=TEXT, parameters={"type": "object"})
_PROFILE = _object({"name": TEXT, "plugins": _list(_object({"pluginRef": TEXT}, weight=WEIGHT))})
PICKER_CONFIG: Schema = _object(
    {
        "apiVersion": {"const": "inference.networking.x-k8s.io/v1alpha1"},
        "kind": {"const": "EndpointPickerConfig"},
        "plugins": _list(_PLUGIN),
        "schedulingProfiles": _list(_PROFILE),
    },
    featureGates=_list(TEXT),
)
