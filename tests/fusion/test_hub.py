"""There and back over HTTP: the real client of the hub against a small hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import hydra_ensembles as hydra
from hydra_ensembles.errors import HydraError
from hydra_ensembles.fusion.summary import make_card
from tests import zoo
from tests.fusion.hub_server import serving
from tests.fusion.test_fusion import EARLY, LATE
from tests.fusion.test_inputs import words

pytestmark = pytest.mark.filterwarnings("ignore:Model config")
ROOT = Path(__file__).parents[2]

PUSH = """
import sys
import hydra_ensembles as hydra
ensemble = hydra.HydraEnsemble.from_pretrained(sys.argv[1])
results = hydra.Results.load(sys.argv[2])
print(ensemble.push_to_hub("somebody/films", results=results, token="hf_secret"))
ensemble.temperature = 2.0
print(ensemble.push_to_hub("somebody/films", token="hf_secret", revision="warm"))
"""

PULL = """
import sys, torch
import hydra_ensembles as hydra
load = hydra.HydraEnsemble.from_pretrained
for revision in (None, "warm"):
    ensemble = load("somebody/films", revision=revision)
    print(ensemble.temperature, ensemble.novelty is not None, ensemble.score)
    print(ensemble.predict(["a good film", "bad films"]).probabilities.tolist())
try:
    load("somebody/nothing")
except hydra.HydraError as error:
    print(type(error).__name__, error)
try:
    ensemble.push_to_hub("somebody/films", token="hf_wrong")
except hydra.HydraError as error:
    print(type(error).__name__, error)
"""


def run(code: str, *arguments: object, address: str, home: Path) -> list[str]:
    """Run code in a process of its own: the client reads its settings when it is imported."""
    settings = {
        "HF_ENDPOINT": address,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_pushed_equals_pulled(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    ensemble.tokenizer = words(tmp_path)
    ensemble.temperature, ensemble.score = 1.25, "entropy"
    batch = {**zoo.batch("bert", size=40), "labels": torch.arange(40) % 5}
    ensemble.fit_novelty_([batch], progress=False)
    ensemble.save_pretrained(tmp_path / "saved")
    results = hydra.evaluate(ensemble, [batch], progress=False, name="films")
    results.save(tmp_path / "results.json", examples=False)
    with serving() as (address, hub):
        pushed = run(
            PUSH, tmp_path / "saved", tmp_path / "results.json", address=address, home=tmp_path
        )
        assert all(line.startswith(f"{address}/somebody/films/commit/") for line in pushed)
        files = hub.files("somebody/films")
        # the weights went as large files, and nothing is there that the folder does not have
        assert {hub.commits[c].get("model.safetensors") for c in hub.commits} & hub.large
        saved = {p.name for p in (tmp_path / "saved").iterdir()}
        assert set(files) == saved
        pulled = run(PULL, address=address, home=tmp_path / "another")
    expected = ensemble.predict(["a good film", "bad films"]).probabilities
    assert pulled[0] == "1.25 True entropy"
    torch.testing.assert_close(torch.tensor(json.loads(pulled[1])), expected)
    assert pulled[2] == "2.0 True entropy"
    assert json.loads(pulled[3]) != json.loads(pulled[1])
    assert "neither a folder on this machine" in pulled[4]
    assert pulled[5].startswith("HydraError Cannot give the ensemble to the hub")
    card = files["README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    assert head["pipeline_tag"] == "text-classification"
    assert 'from_pretrained("somebody/films")' in card
    assert f"{100 * results['cls/Acc']:.2f}" in card and "| cls/NLL ↓" in card
    assert f"{hydra.fusion.summary.counted_cost(ensemble)[0].multiply_adds:.2f} x |" in card
    # figures given once are kept with the ensemble
    again = json.loads(hub.files("somebody/films", "warm")["config.json"])["record"]["results"]
    assert again[0]["figures"] == results.figures


def test_offline_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    with pytest.raises(HydraError, match="save_pretrained"):
        ensemble.push_to_hub("somebody/vit")


def test_the_card_tells_no_paths_and_escapes_nothing_into_its_head(tmp_path: Path) -> None:
    model = zoo.make("vit")
    model.name_or_path = str(tmp_path)
    ensemble = hydra.fuse(model, LATE)
    ensemble.id2label = ["a `tick`", "two\nlines", "x", "y", "z"]
    assert str(tmp_path) not in make_card(ensemble)
    assert "None were given" in make_card(ensemble)
    assert "novelty" not in make_card(ensemble).split("## What was built")[0]
    ensemble.host.name_or_path = "google/vit-base-patch16-224"
    head = yaml.safe_load(make_card(ensemble).split("---")[1])
    assert head["base_model"] == "google/vit-base-patch16-224"
    for hostile in ('owner/name"\nlicense: "mine', "../other"):
        ensemble.host.name_or_path = hostile
        assert "base_model" not in make_card(ensemble)
