"""What lies in `deploy/` names metrics, options and files that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from starlette.testclient import TestClient

from hydra_ensembles.cli.main import app
from hydra_ensembles.serving.limits import Limits
from tests.serving.test_metrics import samples

DEPLOY = Path(__file__).parents[2] / "deploy"


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:hydra|process)_\w+", expression))


def expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana" / "hydra.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    return found + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_dashboard_and_alerts_read_metrics_that_exist(texts: TestClient) -> None:
    texts.post("/predict", json={"text": "bad"})
    known = {name for name, _ in samples(texts)}
    assert len(expressions()) > 15
    for expression in expressions():
        assert metrics_in(expression) <= known, expression
    wanted = {"hydra_confidence_bucket", "hydra_uncertainty_bucket", "hydra_novelty_bucket"}
    assert wanted <= set().union(*map(metrics_in, expressions()))


def test_compose_mounts_files_that_exist() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("gateway", "prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            assert (DEPLOY / volume.split(":")[0]).is_file(), volume
    assert (DEPLOY / services["hydra"]["build"]["context"] / "pyproject.toml").is_file()


def test_the_service_is_behind_the_gateway_and_has_a_token() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert "ports" not in services["hydra"] and services["gateway"]["ports"] == ["8000:8000"]
    assert set(services["hydra"]["secrets"]) <= set(compose["secrets"])
    entry = (DEPLOY / "Dockerfile").read_text().partition("ENTRYPOINT ")[2]
    command = json.loads(entry.splitlines()[0])
    secret = f"/run/secrets/{services['hydra']['secrets'][0]}"
    assert command[command.index("--token-file") + 1] == secret
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = scrape["scrape_configs"]
    assert job["authorization"]["credentials_file"] == secret
    assert services["prometheus"]["secrets"] == services["hydra"]["secrets"]


def test_the_gateway_has_the_limits_of_the_service() -> None:
    text = (DEPLOY / "gateway" / "nginx.conf").read_text()
    settings = dict(re.findall(r"^\s*(\w+) ([^;{]+);", text, re.M))
    limits = Limits()
    assert int(settings["client_max_body_size"].removesuffix("m")) * 2**20 == limits.body
    count, size = settings["large_client_header_buffers"].split()
    assert int(count) * int(size.removesuffix("k")) * 2**10 == limits.headers
    assert int(settings["proxy_read_timeout"].removesuffix("s")) > limits.answer_seconds
    for name in ("client_header_timeout", "client_body_timeout"):
        assert int(settings[name].removesuffix("s")) == limits.read_seconds
    assert settings["proxy_pass"] == "http://hydra:8000"
    assert text.count("{") == text.count("}")


def test_the_entry_point_is_a_command_with_these_options() -> None:
    import typer

    text = (DEPLOY / "Dockerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (.+)$", text, re.M).group(1))  # type: ignore
    assert entry[:2] == ["hydra-ensembles", "serve"]
    command = typer.main.get_command(app).get_command(None, "serve")  # type: ignore
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in entry if word.startswith("--")} <= options
    extras = re.search(r"\[([\w,]+)\]", text.partition("pip install")[2]).group(1)  # type: ignore
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.M), extra
    assert {"serve", "hosts"} <= set(extras.split(","))  # an ensemble of any host can be mounted


@pytest.mark.parametrize("name", ["try_dockerfile.sh"])
def test_scripts_are_executable(name: str) -> None:
    assert (DEPLOY / name).stat().st_mode & 0o111
