"""Manifests for Kubernetes and KServe: valid by schema, and what they name exists in the service.

Kubernetes' own schemas come with `kubernetes-validate`. KServe publishes none as a package, so its
two kinds are compared with the fields that its reference documents, and the containers inside are
validated as parts of a pod. No cluster ran here.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from starlette.testclient import TestClient

import hydra_ensembles
from hydra_ensembles.cli.main import app
from hydra_ensembles.fusion.ensemble import HydraEnsemble
from hydra_ensembles.serving.app import make_app
from hydra_ensembles.serving.service import Service
from hydra_ensembles.serving.torch_backend import TorchBackend

validate = pytest.importorskip("kubernetes_validate")

DEPLOY = Path(__file__).parents[2] / "deploy"
VERSIONS = ("1.28", "1.37")

RUNTIME_FIELDS = {
    *("affinity", "annotations", "builtInAdapter", "containers", "disabled", "grpcDataEndpoint"),
    *("grpcEndpoint", "hostIPC", "httpDataEndpoint", "imagePullSecrets", "labels", "multiModel"),
    *("nodeSelector", "protocolVersions", "replicas", "resourceClaims", "schedulerName"),
    *("storageHelper", "supportedModelFormats", "tolerations", "volumes", "workerSpec"),
}
"""Fields of the spec of a ServingRuntime (serving.kserve.io/v1alpha1)."""

PREDICTOR_FIELDS = {
    *("annotations", "autoScaling", "batcher", "canaryTrafficPercent", "containerConcurrency"),
    *("deploymentStrategy", "labels", "logger", "maxReplicas", "minReplicas", "model"),
    *("scaleMetric", "scaleMetricType", "scaleTarget", "storageUris", "timeout", "workerSpec"),
}
"""Fields that a predictor (serving.kserve.io/v1beta1) has beside those of a pod."""

MODEL_FIELDS = {"modelFormat", "protocolVersion", "runtime", "runtimeVersion", "storage"}
MODEL_FIELDS |= {"storageUri"}
"""Fields that a model has beside those of a container."""


def manifests(name: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / name / "hydra.yaml").read_text())
    return {document["kind"]: document for document in documents}


KUBERNETES, KSERVE = manifests("kubernetes"), manifests("kserve")


def pod(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}


def check(manifest: dict[str, Any], version: str = VERSIONS[-1]) -> None:
    validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", list(KUBERNETES))
def test_kubernetes_manifests_are_valid(kind: str, version: str) -> None:
    check(KUBERNETES[kind], version)


def test_an_unknown_field_is_found() -> None:
    wrong = copy.deepcopy(KUBERNETES["Deployment"])
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(validate.ValidationError, match="readynessProbe"):
        check(wrong)


def test_kserve_manifests_have_documented_fields() -> None:
    assert [m["apiVersion"] for m in KSERVE.values()] == [
        "serving.kserve.io/v1alpha1",
        "serving.kserve.io/v1beta1",
    ]
    runtime, service = (manifest["spec"] for manifest in KSERVE.values())
    assert runtime.keys() <= RUNTIME_FIELDS
    check(pod({"containers": runtime["containers"]}))
    assert service.keys() <= {"predictor", "transformer", "explainer"}
    predictor = service["predictor"]
    model = predictor["model"]
    container = {key: value for key, value in model.items() if key not in MODEL_FIELDS}
    rest = {key: value for key, value in predictor.items() if key not in PREDICTOR_FIELDS}
    check(pod({**rest, "containers": [{"name": "kserve-container", "image": "x", **container}]}))
    formats = {entry["name"] for entry in runtime["supportedModelFormats"]}
    assert model["modelFormat"]["name"] in formats
    assert model["runtime"] == KSERVE["ServingRuntime"]["metadata"]["name"]
    assert model["protocolVersion"] in runtime["protocolVersions"] == ["v2"]
    assert runtime["containers"][0]["name"] == "kserve-container"  # KServe looks for this name


def containers() -> list[dict[str, Any]]:
    pods = KUBERNETES["Deployment"]["spec"]["template"]["spec"]
    return [*pods["containers"], *KSERVE["ServingRuntime"]["spec"]["containers"]]


@pytest.mark.parametrize("container", containers(), ids=["kubernetes", "kserve"])
def test_containers_start_a_command_that_exists(container: dict[str, Any]) -> None:
    words = [*container["command"], *container["args"]]
    assert words[:2] == ["hydra-ensembles", "serve"]
    command = typer.main.get_command(app).get_command(None, "serve")  # type: ignore[attr-defined]
    context = command.make_context("serve", words[2:])
    given = context.params
    assert given["host"] == "0.0.0.0" and bool(given["token_file"]) != given["no_token"]
    assert given["port"] == container["ports"][0]["containerPort"]
    mounts = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
    if mounts:
        assert {str(given["folder"]), str(given["token_file"]), "/tmp"} == mounts
    assert container["image"] == f"hydra-ensembles:{hydra_ensembles.__version__}"
    secure = container["securityContext"]
    assert secure["allowPrivilegeEscalation"] is False and secure["capabilities"]["drop"] == ["ALL"]


def test_names_and_claims_belong_together() -> None:
    deployment = KUBERNETES["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    for chosen in (deployment["selector"], KUBERNETES["PodDisruptionBudget"]["spec"]["selector"]):
        assert chosen["matchLabels"] == labels
    assert KUBERNETES["Service"]["spec"]["selector"] == labels
    spec = deployment["template"]["spec"]
    (container,) = spec["containers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    claim = KUBERNETES["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["model"]["persistentVolumeClaim"]["claimName"] == claim
    assert spec["terminationGracePeriodSeconds"] > 30  # what the service takes to answer and stop
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0


@pytest.mark.parametrize("container", containers(), ids=["kubernetes", "kserve"])
def test_probes_are_answered_without_a_token(
    container: dict[str, Any], text_ensemble: HydraEnsemble
) -> None:
    service = Service(TorchBackend(text_ensemble), "ensemble")
    ports = {port.get("name"): port["containerPort"] for port in container["ports"]}
    with TestClient(make_app(service, version="0", tokens=(b"a-token-0123456789",))) as client:
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            if name in container:
                probe = container[name]["httpGet"]
                assert client.get(probe["path"]).status_code == 200
                assert ports.get(probe["port"], probe["port"]) in ports.values()
