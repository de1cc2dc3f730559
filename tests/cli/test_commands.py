"""Every command on a small model: what it prints, what it writes, what can be read back."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml

from hydra_ensembles import HeadMask, HydraEnsemble, Results
from hydra_ensembles.cli.main import COMMANDS, main
from hydra_ensembles.costs.budget import Budget
from hydra_ensembles.data import digits
from hydra_ensembles.heads.head_mask import HeadScores
from hydra_ensembles.hosts import host_model
from tests.test_records import held_elsewhere


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def ensemble(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build once; the tests below look at it."""
    folder = tmp_path_factory.mktemp("built") / "ensemble"
    arguments = ("--data", shelf / "digits", "--ood", f"noise={shelf / 'noise'}", "-o", folder)
    assert run("build", shelf / "host", *arguments, "--members", 2, "--json") == 0
    return folder


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    for name in COMMANDS:
        assert run(name, "--help") == 0
        assert "Usage:" in capsys.readouterr().out


def test_version_and_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0 and capsys.readouterr().out.strip() == "0.2.0"
    assert run("env", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {"python", "torch", "hydra-ensembles"} <= found.keys()


def test_explain(shelf: Path, ensemble: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", ensemble) == 0
    assert "2 members" in capsys.readouterr().out


def test_build_writes_a_folder_and_its_resolved_config(shelf: Path, ensemble: Path) -> None:
    loaded = HydraEnsemble.from_pretrained(ensemble)
    assert loaded.members == 2 and loaded.record["settings"]["method"] == "auto"
    config = yaml.safe_load((ensemble / "config.yaml").read_text())
    assert config["command"] == "build" and config["members"] == 2 and config["max_cost"] == 1.07


def test_a_refused_build_leaves_the_folder_as_it_was(shelf: Path, ensemble: Path) -> None:
    before = {path: path.read_bytes() for path in ensemble.rglob("*") if path.is_file()}
    other = ("--data", shelf / "digits", "--members", 3, "-o", ensemble)
    assert run("build", shelf / "host", *other) != 0  # the state there is of another build
    assert {path: path.read_bytes() for path in ensemble.rglob("*") if path.is_file()} == before


def test_build_saves_a_policy_that_predict_uses(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", shelf / "digits", "--held-out", shelf / "more", "--risk", 0.95)
    fast = ("--method", "random", "--members", 2, "--max-cost", 0, "-o", tmp_path)
    assert run("build", shelf / "host", *data, *fast) == 0
    policy = HydraEnsemble.from_pretrained(tmp_path).policy
    assert policy is not None and policy.risk == 0.95 and policy.alarm == 0.05
    capsys.readouterr()
    assert run("predict", tmp_path, shelf / "noise") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line in lines:
        unsure = not line["uncertainty"] <= policy.threshold
        new = not line["novelty_score"] <= policy.novelty_threshold
        assert line["decision"] == ("new" if new else "unsure" if unsure else "answer")
        assert bool(line["why"]) == (unsure or new)


def test_policy_is_fitted_and_saved(
    shelf: Path, ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--data", shelf / "more", "--risk", 0.9, "--alarm", 0.1, "-o", tmp_path / "new")
    assert run("policy", ensemble, *arguments) == 0
    assert "answered and wrong: at most 0.9" in capsys.readouterr().out
    policy = HydraEnsemble.from_pretrained(tmp_path / "new").policy
    assert policy is not None and policy.examples == 40 and policy.alarm == 0.1
    assert HydraEnsemble.from_pretrained(ensemble).policy is None
    assert run("policy", tmp_path / "new", "--data", shelf / "more", "--risk", 0, "--json") == 0
    assert json.loads(capsys.readouterr().out)["risk"] is None  # saved over itself
    assert HydraEnsemble.from_pretrained(tmp_path / "new").policy.risk is None


def test_sets_are_fitted_and_saved(
    shelf: Path, ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--held-out", shelf / "more", "--coverage", 0.8, "-o", tmp_path / "new")
    assert run("sets", ensemble, *arguments) == 0
    assert "lac at coverage 0.8 (40 examples)" in capsys.readouterr().out
    saved = HydraEnsemble.from_pretrained(tmp_path / "new")
    assert saved.sets is not None and saved.sets.examples == 40
    given = ("--data", shelf / "more", "--method", "aps", "--randomised", "--json")
    assert run("sets", tmp_path / "new", *given) == 0  # saved over itself
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "aps" and found["randomised"] and found["coverage"] == 0.9
    pictures = sorted((shelf / "more").rglob("*.png"))[:3]
    assert run("predict", tmp_path / "new", *pictures) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    loaded = HydraEnsemble.from_pretrained(tmp_path / "new")
    assert [line["set"] for line in lines] == loaded.predict(list(map(str, pictures))).set
    before = (tmp_path / "new" / "config.json").read_bytes()
    assert run("sets", tmp_path / "new", "--held-out", shelf / "more", "--coverage", 0.99) == 3
    said = capsys.readouterr().err
    assert "at least 99 held-out examples" in said and "as it was" in said
    assert (tmp_path / "new" / "config.json").read_bytes() == before


def test_a_policy_out_of_reach_is_not_saved(
    shelf: Path, ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--data", shelf / "more", "--alarm", 0.1)
    assert run("policy", ensemble, *given, "--risk", 0.9, "-o", tmp_path) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run("policy", tmp_path, *given, "--risk", 0.005) == 3
    said = capsys.readouterr().err
    assert "at least 199 labelled examples" in said and "smallest risk" in said
    assert "as it was" in said
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_build_whose_policy_is_out_of_reach_is_saved_without_it(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", shelf / "digits", "--held-out", shelf / "more", "--risk", 0.005)
    fast = ("--method", "random", "--members", 2, "--max-cost", 0, "-o", tmp_path)
    assert run("build", shelf / "host", *data, *fast) == 3
    assert "smallest risk" in capsys.readouterr().err
    assert HydraEnsemble.from_pretrained(tmp_path).policy is None


def test_distill_takes_teachers_or_makes_them(
    shelf: Path, ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (shelf / "host", "--data", shelf / "digits", "--members", 2, "--max-cost", 1.5)
    few = ("--epochs", 1, "--views", 1, "--json")
    out = tmp_path / "student"
    assert run("distill", *given, *few, "--teachers", ensemble, "-o", out) == 0
    student = HydraEnsemble.from_pretrained(out)
    assert student.members == 2 and student.record["shares"] == [[1, 0], [0, 1]]
    assert (out / "state" / "answers" / "teacher-0-data-0.npy").is_file()
    made = tmp_path / "made"
    arguments = ("--make", "branch", "--count", 2, "-o", made)
    assert run("distill", *given, *few, *arguments) == 0
    assert len(HydraEnsemble.from_pretrained(made).record["teachers"]) == 2
    capsys.readouterr()
    assert run("distill", *given) == 2
    assert "--make branch" in capsys.readouterr().err


def test_a_resolved_config_makes_the_same_again(
    shelf: Path, ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again"
    assert run("build", "--config", ensemble / "config.yaml", "-o", again) == 0
    one, two = (json.loads((f / "config.json").read_text()) for f in (ensemble, again))
    assert one["masks"] == two["masks"] and one["sha256"] == two["sha256"]
    assert yaml.safe_load((again / "config.yaml").read_text())["output"] == str(again)


def test_score_writes_tables_and_masks(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--criterion", "his", "--criterion", "magnitude", "--keep", 0.5, "-o", tmp_path)
    assert run("score", shelf / "host", "--data", shelf / "digits", *arguments, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    scores = HeadScores.from_json(tmp_path / "scores-his.json")
    assert scores.shape == (4, 4)
    assert printed["his"][1] == pytest.approx(scores[1].tolist(), rel=1e-5)
    assert HeadMask.from_json(tmp_path / "mask-magnitude.json").total_kept == 4


def test_circuit_goes_on_where_it_stopped(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--data", shelf / "digits", "--ood", shelf / "noise", "-o", tmp_path)
    assert run("circuit", shelf / "host", *arguments) == 0
    first = (tmp_path / "circuit.json").read_text()
    assert run("circuit", shelf / "host", *arguments) == 0
    assert (tmp_path / "circuit.json").read_text() == first
    assert HeadMask.from_json(tmp_path / "mask.json").kept == (2, 2)
    assert "Circuit for ood-auroc" in capsys.readouterr().out


def test_circuit_keeps_what_a_budget_allows(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("circuit", shelf / "host", "--data", shelf / "digits", "--objective", "id-loss")
    assert run(*arguments, "--max-cost", 0.55, "-o", tmp_path) == 0
    mask = HeadMask.from_json(tmp_path / "mask.json")
    host = HydraEnsemble.from_pretrained(shelf / "host").member(0)
    one = next(iter(digits(16, seed=0).test.subset([0])))
    budget = Budget.of(host_model(host), one, 0.55)
    assert budget.ratio([mask]) <= 0.55 and 0 < mask.total_kept < 8
    assert run(*arguments, "--max-cost", 0.55, "--keep", 0.5, "-o", tmp_path / "both") == 2
    assert "give one" in capsys.readouterr().err


def test_eval_and_report(
    shelf: Path, ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", shelf / "digits", "--ood", f"noise={shelf / 'noise'}", "-o", tmp_path)
    more = ("--corruption", "gaussian_noise", "--attack", "fgsm,pgd", "--json")
    assert run("eval", f"hydra={ensemble}", f"single={shelf / 'host'}", *data, *more) == 0
    printed = json.loads(capsys.readouterr().out)
    found = Results.load(tmp_path / "results-hydra.json")
    assert printed["hydra"]["cls/Acc"] == found["cls/Acc"] and printed["single"]["cost"] <= 1
    assert found.scores[0] == HydraEnsemble.from_pretrained(ensemble).score  # as predict reports
    assert "shift/gaussian_noise/cls/Acc" in found and "ood/noise/AUROC" in found
    attacked = [found[f"shift/{attack}/cls/NLL"] for attack in ("fgsm", "pgd")]
    assert found["cls/NLL"] < attacked[0] < attacked[1]
    page = (tmp_path / "report.html").read_text()
    assert "member 2" in page and "data:image/png" in page and '<th scope="row">noise</th>' in page

    other = tmp_path / "again.html"
    assert run("report", tmp_path, "--ensemble", ensemble, "-o", other) == 0
    again = other.read_text()
    assert again.index(">hydra<") < again.index(">single<") and "member 2" in again


def test_eval_compares_like_with_like(
    shelf: Path, ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", shelf / "digits", "--score", "msp", "--no-report", "--bootstrap", 50)
    warm = HydraEnsemble.from_pretrained(ensemble)
    warm.temperature = 1.5
    warm.save_pretrained(tmp_path / "warm")
    models = (f"hydra={tmp_path / 'warm'}", f"single={shelf / 'host'}")
    assert run("eval", *models, *data, "-o", tmp_path / "plain") == 0
    printed = capsys.readouterr().out
    assert "hydra against single: " in printed and "on 64 examples" in printed
    assert "No temperature was fitted for single" in printed
    more = ("--calibration", shelf / "more", "-o", tmp_path / "calibrated")
    assert run("eval", *models, *data, *more) == 0
    assert "No temperature" not in capsys.readouterr().out
    plain, scaled = (
        Results.load(tmp_path / folder / "results-single.json")
        for folder in ("plain", "calibrated")
    )
    assert plain["cls/Acc"] == scaled["cls/Acc"] and plain["cls/NLL"] != scaled["cls/NLL"]


def test_bench_compares_with_members_one_by_one(
    ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--batch", 1, "--rounds", 3, "-o", tmp_path, "--json")
    assert run("bench", ensemble, *arguments) == 0
    json.loads(capsys.readouterr().out)
    assert (tmp_path / "benchmark.json").is_file()


def test_sweep(shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--criterion", "magnitude", "--ratio", 0.5, "--draws", 1, "-o", tmp_path)
    assert run("sweep", shelf / "host", "--data", shelf / "digits", *arguments) == 0
    assert "magnitude" in capsys.readouterr().out and (tmp_path / "sweep.json").is_file()


def test_predict_streams_files_and_abstains_at_a_risk(
    shelf: Path, ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = ("--held-out", shelf / "digits", "--risk", 0.95, "--guarantee", "conformal")
    assert run("predict", ensemble, shelf / "noise", *held_out, "--probabilities") == 0
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert len(lines) == 12 and "conformal" in printed.err
    for line in lines:
        assert line["label"] == str(line["class"])
        assert line["decision"] in ("answer", "unsure", "new")
        assert max(line["probabilities"]) == pytest.approx(line["confidence"], abs=2e-6)
    assert run("predict", ensemble, shelf / "noise", "--threshold", -1e9) == 0
    for line in map(json.loads, capsys.readouterr().out.splitlines()):
        assert line["decision"] == "unsure"
    assert run("predict", ensemble, shelf / "noise", "--alarm", 0.1) == 0
    for line in map(json.loads, capsys.readouterr().out.splitlines()):
        new = line["novelty"] > 0.9
        assert (line["decision"] == "new") == new == (line["why"] == "too new")
    assert run("predict", shelf / "host", shelf / "noise", "--alarm", 0.1) == 2


def test_a_file_or_folder_that_another_process_writes_is_refused(
    shelf: Path, ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "answers.jsonl", tmp_path / "run"
    (tmp_path / "answers.jsonl.partial").write_text("of the other")
    with held_elsewhere(file, is_file=True), held_elsewhere(folder):
        assert run("predict", ensemble, shelf / "noise", "-o", file) == 9
        assert "choose another file with --output" in capsys.readouterr().err
        assert run("build", shelf / "host", "--data", shelf / "digits", "-o", folder) == 9
        assert "choose another folder with --output" in capsys.readouterr().err
        assert run("eval", ensemble, "--data", shelf / "digits", "-o", folder) == 9
        assert run("export", ensemble, "-o", folder) == 9
    assert (tmp_path / "answers.jsonl.partial").read_text() == "of the other"
    assert not file.exists() and list(folder.iterdir()) == []
    assert run("predict", ensemble, shelf / "noise", "-o", file) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"answers.jsonl", "run"}


def test_predict_reads_standard_input(
    shelf: Path, ensemble: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = next((shelf / "noise").iterdir())
    lines = f"{picture}\n\n" + json.dumps({"file": str(picture), "id": 7}) + "\n{bad\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run("predict", ensemble) == 3
    lines = capsys.readouterr().out.splitlines()
    plain, blank, tagged, bad = map(json.loads, lines)
    assert "skipped" in blank and [plain["line"], tagged["line"], bad["line"]] == [1, 3, 4]
    assert tagged["id"] == 7 and tagged["uncertainty"] == pytest.approx(plain["uncertainty"])
    assert "expected a JSON object" in bad["error"] and bad["decision"] is None


def test_what_predict_skips_is_no_failure(
    shelf: Path, ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.md").write_text("not an image")
    assert run("predict", ensemble, tmp_path) == 3  # nothing to predict
    assert "nothing to predict" in capsys.readouterr().err
    (tmp_path / "a.png").write_bytes(next((shelf / "noise").iterdir()).read_bytes())
    assert run("predict", ensemble, tmp_path) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2 and "1 skipped" in said.err


def test_export_writes_programs_that_answer_as_the_ensemble(
    shelf: Path, ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hydra_ensembles import runtime

    out = tmp_path / "exported"
    example = ("--example", shelf / "digits", "--json")
    assert run("export", ensemble, "-o", out, *example) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["largest_difference"]["onnx"]["probabilities"] < 1e-4
    program = runtime.load(out)
    images = {"pixel_values": next(iter(digits(16, seed=0).test))["pixel_values"][:4]}
    expected = HydraEnsemble.from_pretrained(ensemble).predict(images)
    outputs = program.run({name: tensor.numpy() for name, tensor in images.items()})
    assert outputs["class"].tolist() == expected.class_index.tolist()
    assert run("export", ensemble, "-o", out, "--example", tmp_path / "nothing") == 3
