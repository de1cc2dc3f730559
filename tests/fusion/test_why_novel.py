"""Why an input is new: its nearest known examples, facts outside their range, and a note."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hydra_ensembles import HydraEnsemble, build, distill
from hydra_ensembles._records import sealed
from hydra_ensembles.data import text_data
from hydra_ensembles.errors import DataError, FormatError
from hydra_ensembles.fusion.folder_schema import DIGEST
from hydra_ensembles.uncertainty.evidence import KNOWN
from tests import zoo
from tests.builder.test_repeating import WORDS, tokenizer
from tests.fusion.test_known import ensemble_of

TEXTS = [" ".join(WORDS[(7 * i + 3 * j) % 12] for j in range(4 + i % 5)) for i in range(45)]
SHORT = "length 1 word; known texts have 4 to 8"
FEW = "length 1 token; known texts have 4 to 8"


def texts() -> object:
    return text_data(TEXTS, tokenizer(), labels=[i % 3 for i in range(45)], batch_size=15)


def fitted(**options: object) -> HydraEnsemble:
    ensemble = ensemble_of("bert")
    ensemble.tokenizer = tokenizer()
    return ensemble.fit_novelty_(texts(), progress=False, **options)  # type: ignore[arg-type]


def check(ensemble: HydraEnsemble) -> None:
    """Check that an ensemble which knows the texts names them, and says what a word lacks."""
    found = ensemble.why_novel([TEXTS[3], "film"])
    position, name, similarity = found.nearest(0)[0]
    assert name in TEXTS and similarity == pytest.approx(1, abs=1e-4) and position >= 0
    assert found.lines(0) == [KNOWN] and found.lines(1) == [SHORT, FEW]
    assert f"{name} (1.00)" in str(found) and SHORT in str(found) and KNOWN in str(found)
    plain = json.loads(json.dumps(found.to_dict(1)))
    assert plain["facts"] == [SHORT, FEW] and plain["note"] is None
    assert [near["name"] in TEXTS for near in plain["nearest"]] == [True] * 3


def test_novelty_that_is_fitted() -> None:
    check(fitted())


def test_an_ensemble_that_is_built_and_saved(tmp_path: Path) -> None:
    build(zoo.sharp("bert"), texts(), members=2, max_cost=1.5, progress=False).save_pretrained(
        tmp_path
    )
    check(HydraEnsemble.from_pretrained(tmp_path))


def test_an_ensemble_that_is_distilled() -> None:
    model = zoo.sharp("bert")
    ensemble = distill(
        model, [model], texts(), members=1, epochs=1, ood=None, progress=False, max_cost=2.0
    )
    ensemble.tokenizer = tokenizer()
    names = ensemble.why_novel(["film"]).names
    assert set(filter(None, names)) <= set(TEXTS) and any(names)


def test_prepared_tensors_say_what_they_can() -> None:
    tokens = tokenizer()
    known = [
        dict(tokens(TEXTS[i : i + 5], padding=True, return_tensors="pt")) for i in range(0, 45, 5)
    ]
    ensemble = ensemble_of("bert")
    ensemble.tokenizer = tokens
    ensemble.fit_novelty_(known, progress=False)
    found = ensemble.why_novel(dict(tokens(["film"], return_tensors="pt")))
    assert found.lines(0) == [FEW] and found.nearest(0)[0][1] in TEXTS  # read from the tokens
    raw = fitted().why_novel(dict(tokens(["film"], return_tensors="pt")), raw=["film"])
    assert raw.lines(0) == [SHORT, FEW]
    ensemble.tokenizer = None
    ensemble.fit_novelty_(known, progress=False)
    assert ensemble.why_novel(known[0]).nearest(0)[0][1] is None


def test_images_are_too_dark_or_known() -> None:
    known = [zoo.batch("vit", size=4, seed=10 + i) for i in range(6)]
    ensemble = ensemble_of("vit").fit_novelty_(known, progress=False)
    found = ensemble.why_novel(torch.cat([known[2][1:2], known[0][:1] - 9]))
    assert found.lines(0) == [KNOWN]
    assert [line.split()[0] for line in found.lines(1)] == ["brightness"]


def test_names_are_bounded_and_can_be_left_out(tmp_path: Path) -> None:
    ensemble = fitted(names=False)
    assert ensemble.why_novel(["film"]).names == () and ensemble.why_novel(["film"]).lines(0)
    ensemble = fitted(names=["x" * 500] * 45)
    assert {len(name) for name in ensemble.why_novel(["film"]).names} == {100}
    ensemble.forget_names_().save_pretrained(tmp_path)
    assert "xxx" not in (tmp_path / "config.json").read_text()
    with pytest.raises(DataError, match="3 names for 45 known examples"):
        fitted(names=["a", "b", "c"])


def test_older_folders_load_and_damaged_names_are_refused(tmp_path: Path) -> None:
    ensemble = fitted()
    ensemble.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    novelty = config["novelty"]

    def load(**changes: object) -> HydraEnsemble:
        plain = {key: value for key, value in {**novelty, **changes}.items() if value is not None}
        path.write_text(json.dumps(sealed({**config, "novelty": plain}, DIGEST)))
        return HydraEnsemble.from_pretrained(tmp_path)

    old = load(bank_names=None, ranges=None, names=TEXTS)
    expected = ensemble.why_novel(["film"])
    assert old.why_novel(["film"]).nearest(0) == expected.nearest(0)
    assert old.why_novel(["film"]).lines(0) == []
    old.save_pretrained(tmp_path / "again")
    again = HydraEnsemble.from_pretrained(tmp_path / "again")
    assert again.why_novel(["film"]).nearest(0) == expected.nearest(0)
    with pytest.raises(FormatError, match="2 names for 45"):
        load(bank_names=["a", "b"])
    with pytest.raises(FormatError, match="ranges of known inputs"):
        load(ranges={"ranges": [], "scripts": "", "scale": 3})
