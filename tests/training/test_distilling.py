"""Distillation: a teacher per member, every kind of teacher, the same bits after a stop."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from hydra_ensembles.data import as_data
from hydra_ensembles.errors import DataError, FormatError, MaskError
from hydra_ensembles.tasks import MultiClass
from hydra_ensembles.training import DISTILL, Settings, distill, finetune
from hydra_ensembles.training.distillation import DistillRun
from hydra_ensembles.training.teacher_answers import assign
from hydra_ensembles.training.trunk_cache import folded_start
from hydra_ensembles.training.views import Views
from tests import zoo
from tests.training.arguments import arguments

MASKS = [
    HeadMask([[1, 1, 1, 1], [1, 1, 1, 1], last])
    for last in ([1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1])
]
COUNT = 32


@cache
def model(name: str = "vit") -> nn.Module:
    return zoo.make(name)


@cache
def teacher(place: int, name: str = "vit") -> nn.Module:
    """The host with classifiers of other signs, so that teachers contradict each other."""
    result = copy.deepcopy(model(name))
    with torch.no_grad():
        result.classifier.weight.copy_(result.classifier.weight.roll(place, 0))
    return result.eval()


@cache
def data(name: str = "vit", count: int = COUNT) -> Any:
    labels = torch.randint(5, (count,), generator=torch.Generator().manual_seed(0))
    inputs = zoo.batch(name, count)
    if name in zoo.TEXTS:
        return [
            {k: v[i : i + 8] for k, v in {**inputs, "labels": labels}.items()}
            for i in (0, 8, 16, 24)
        ]
    return [(inputs[i : i + 8], labels[i : i + 8]) for i in range(0, count, 8)]


def train(teachers: Any, batches: Any = None, **options: Any) -> hydra.HydraEnsemble:
    name = options.pop("name", "vit")
    given = {
        "masks": MASKS,
        "epochs": 2,
        "learning_rate": 5e-3,
        "progress": False,
        "validation": data(name),
        "novelty": False,
        **options,
    }
    batches = data(name) if batches is None else batches
    return distill(model(name), teachers, batches, **arguments(DISTILL, given))


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).detach().abs().max()) for n in ours)


def test_the_rule_for_teachers_and_members():
    assert assign(3, 3).tolist() == torch.eye(3).tolist()
    assert assign(5, 2).tolist() == pytest.approx(
        torch.tensor([[1 / 3, 0, 1 / 3, 0, 1 / 3], [0, 0.5, 0, 0.5, 0]])
    )
    assert assign(2, 3).tolist() == [[1, 0], [0, 1], [1, 0]]
    assert assign(3, 1).tolist() == pytest.approx(torch.full((1, 3), 1 / 3))


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_each_member_learns_its_own_teacher(name):
    teachers = [teacher(place, name) for place in range(3)]
    student = train(
        teachers, name=name, epochs=40, learning_rate=1e-2, ood=None, views=1, calibrate=False
    )
    with torch.no_grad():
        ours = torch.cat([student.member_logits(b) for b in data(name)]).softmax(-1)
        theirs = [torch.cat([main(t, b) for b in data(name)]).softmax(-1) for t in teachers]
    distances = torch.stack(
        [torch.stack([(ours[:, m] - q).abs().mean() for q in theirs]) for m in range(3)]
    )
    assert distances.argmin(1).tolist() == [0, 1, 2]
    assert float(distances.diagonal().max()) < 0.5 * float(distances.mean())
    assert not student.training and student.record["shares"] == torch.eye(3).tolist()
    hydra.verify(student, zoo.batch(name))


def main(model: nn.Module, batch: Any) -> torch.Tensor:
    from hydra_ensembles.data.model_runs import call_model, member_logits_of

    return member_logits_of(call_model(model, batch))[:, 0]


@pytest.mark.parametrize("part", ["data", "outliers"])
def test_a_share_of_the_loss_is_that_of_the_mean(part):
    run = object.__new__(DistillRun)
    run.task = MultiClass()
    run.settings = Settings(distill=0.7, joint=0.25, teacher_temperature=2.0)
    source = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6, 3, 5, generator=source)
    target = torch.randn(6, 3, 5, generator=source).softmax(-1)
    labels = torch.randint(5, (6,), generator=source)
    found = run._losses(part, target, logits, {"labels": labels})

    warm, plain = (logits / 2).softmax(-1), logits.softmax(-1)
    own = -4 * (target * warm.log()).sum(-1)
    mean = -4 * (target.mean(1) * warm.mean(1).log()).sum(-1)
    if part == "data":
        rows = torch.arange(6)
        own = 0.7 * own - 0.3 * plain[rows, :, labels].log()
        mean = 0.7 * mean - 0.3 * plain.mean(1)[rows, labels].log()
    torch.testing.assert_close(found, 0.75 * own + 0.25 * mean[:, None])


def test_joint_brings_the_mean_nearer_to_the_teachers_and_leaves_one_student_as_it_is():
    teachers = [teacher(place) for place in range(3)]

    def distance(joint: float) -> float:
        student = train(
            teachers, settings=replace(DISTILL, joint=joint), epochs=20, ood=None, views=1
        )
        with torch.no_grad():
            ours = torch.cat([student.member_logits(b) for b in data()]).softmax(-1).mean(1)
            theirs = torch.stack([torch.cat([main(t, b) for b in data()]) for t in teachers])
        return float((ours - theirs.softmax(-1).mean(0)).abs().mean())

    assert distance(0.8) < distance(0.0)
    one = {"masks": None, "members": 1}
    alone = [train(teachers, **one, settings=replace(DISTILL, joint=j)) for j in (0.0, 0.8)]
    assert largest_difference(*alone) == 0


def test_joint_is_a_share():
    with pytest.raises(ValueError, match="joint is 1"):
        Settings(joint=1.0)


def test_the_trunk_is_frozen_slow_or_trained():
    teachers = [teacher(place) for place in range(3)]

    def moved(rate: float) -> float:
        student = train(teachers, trunk_rate=rate)
        before = hydra.fuse(model(), MASKS).state_dict()
        after = student.state_dict()
        return max(float((after[k] - v).abs().max()) for k, v in before.items() if ".trunk." in k)

    frozen, slow, fast = moved(0.0), moved(0.1), moved(1.0)
    assert frozen == 0 < slow < fast


def test_the_budget_chooses_distinct_heads():
    student = train([teacher(0), teacher(1)], masks=None, members=2, max_cost=1.05)
    cost = hydra.cost(student, zoo.batch("vit"))
    assert cost.relative_to(hydra.cost(model(), zoo.batch("vit"))).multiply_adds <= 1.05
    assert student.masks[0] != student.masks[1]
    with pytest.raises(MaskError, match="equal members stay equal"):
        train([teacher(0)], masks=[MASKS[0]] * 3)
    with pytest.raises(MaskError, match="2 masks for 3"):
        train([teacher(0)], masks=MASKS[:2])


def test_members_with_mlps_of_their_own_learn_more_at_the_same_cost(tmp_path):
    options: dict[str, Any] = {"ood": None, "views": 1, "epochs": 20, "calibrate": False}
    teachers = [teacher(place) for place in (0, 1, 2)]
    shared = train(teachers, **options)
    own = train(teachers, **options, own_mlps=True, folder=tmp_path / "own")
    assert own.record["cost"] == shared.record["cost"]
    losses = [student.record["training"]["history"][-1]["loss"] for student in (shared, own)]
    assert losses[1] < losses[0]
    own.save_pretrained(tmp_path / "saved")
    again = hydra.HydraEnsemble.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again.member_logits(data()[0]), own.member_logits(data()[0]))


def test_the_share_of_heads_is_bounded():
    batch = data()[0]
    few = train([teacher(0), teacher(1)], masks=None, members=2, max_cost=3.0, branch_layer=2)
    more = train(
        [teacher(0), teacher(1)], masks=None, members=2, max_cost=3.0, branch_layer=2, at_most=0.75
    )
    assert [mask.kept[2] for mask in few.masks] == [2, 2]
    assert [mask.kept[2] for mask in more.masks] == [3, 3]
    assert hydra.cost(more, batch).multiply_adds > hydra.cost(few, batch).multiply_adds


def test_one_member_is_a_student_of_the_mean():
    teachers = [teacher(place) for place in range(3)]
    student = train(teachers, masks=None, members=1, branch_layer=1)
    assert student.members == 1 and student.plan.trunk == 1
    assert student.record["shares"] == [pytest.approx([1 / 3] * 3)]
    assert "taught   by 3 teachers, their mean: 8 steps on 32 examples, trunk frozen" in str(
        student
    )
    assert student.masks[0] == HeadMask.full(model())


def tables() -> list[torch.Tensor]:
    with torch.no_grad():
        return [
            torch.cat([main(teacher(place), b) for b in data()]).softmax(-1) for place in range(3)
        ]


def answer(place: int, images: torch.Tensor) -> torch.Tensor:
    return teacher(place)(images).logits.softmax(-1)


def test_all_kinds_of_teachers_teach_the_same(tmp_path):
    options: dict[str, Any] = {"ood": None, "views": 1}
    whole = train([teacher(place) for place in range(3)], **options)
    probabilities = tables()
    np.save(tmp_path / "first.npy", probabilities[0].numpy())
    save_file({"probabilities": probabilities[1]}, tmp_path / "second.safetensors")
    paths = [tmp_path / "first.npy", tmp_path / "second.safetensors", probabilities[2]]
    for given in (
        paths,
        [partial(answer, place) for place in range(3)],
        torch.stack(probabilities, 1),
    ):
        ours = train(given, **options)
        with torch.no_grad():  # AdamW turns the rounding of zero gradients into steps
            pair = [student.member_logits(zoo.batch("vit")) for student in (whole, ours)]
        torch.testing.assert_close(*pair, atol=1e-3, rtol=0)
    for place in range(3):
        save_file(teacher(place).state_dict(), tmp_path / f"weights-{place}.safetensors")
    files = [tmp_path / f"weights-{place}.safetensors" for place in range(3)]
    assert largest_difference(whole, train(files, **options)) == 0


def test_ensembles_and_checkpoints_teach(tmp_path):
    run = finetune(model(), data(), epochs=1, learning_rate=1e-3, folder=tmp_path, progress=False)
    options: dict[str, Any] = {"ood": None, "views": 1, "members": 3}
    by_model = train(run[0].model, **options)
    assert largest_difference(by_model, train(tmp_path / "member-0", **options)) == 0
    ensemble = hydra.fuse(model(), MASKS)
    student = train(ensemble, **options)
    assert student.record["shares"] == torch.eye(3).tolist()
    ensemble.save_pretrained(tmp_path / "saved")
    assert largest_difference(student, train(tmp_path / "saved", **options)) == 0


class Stop(Exception):
    pass


@pytest.mark.parametrize(("rate", "step"), [(0.0, 5), (0.5, 3)])
def test_a_stopped_run_ends_with_the_same_bits(tmp_path, rate, step):
    teachers = [teacher(place) for place in range(3)]
    options: dict[str, Any] = {"trunk_rate": rate, "save_every": 1, "views": 2}

    def stop(info: Any) -> None:
        if info.step == step:
            raise Stop

    with pytest.raises(Stop):
        train(teachers, folder=tmp_path, on_step=stop, **options)
    answers = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "answers").glob("*.npy")}
    assert len(answers) == 3 * 2 * 2
    resumed = train(teachers, folder=tmp_path, **options)
    assert answers == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "answers").glob("*.npy")}
    assert largest_difference(resumed, train(teachers, **options)) == 0
    with pytest.raises(FormatError, match="different settings"):
        train(teachers, folder=tmp_path, **{**options, "views": 1})
    with pytest.raises(FormatError, match="teachers"):
        train(teachers[::-1], folder=tmp_path, **options)


def test_unlabelled_data_and_outliers_of_ones_own():
    inputs = [x for x, _ in data()]
    teachers = [teacher(place) for place in range(3)]
    student = train(teachers, inputs, validation=None, ood=[inputs[0] * 3], novelty=True)
    assert student.predict(inputs[0]).novelty is not None
    assert student.temperature is None and student.record["examples"]["outliers"] == 8
    labelled = train(teachers, validation=None)
    assert labelled.temperature is not None
    assert labelled.record["examples"]["data"] == 29  # a tenth of 32 is held out


def test_the_loss_is_the_members_cross_entropy():
    teachers, losses = [teacher(place) for place in range(3)], []
    batch = data()[:1]
    train(teachers, batch, epochs=1, ood=None, views=1, on_step=lambda i: losses.append(i.loss))
    with torch.no_grad():
        logits = hydra.fuse(model(), MASKS).eval().member_logits(batch[0])
        target = torch.stack([main(t, batch[0]).softmax(-1) for t in teachers], 1)
    expected = -(target * logits.log_softmax(-1)).sum(-1).mean()
    assert losses[0] == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_views_belong_to_the_example(name):
    views = Views(data(name), seed=1)
    batch = data(name)[0]
    numbers = torch.arange(8)
    part = {k: v[2:5] for k, v in batch.items()} if name == "bert" else tuple(v[2:5] for v in batch)
    for make in (views.light, views.destroyed):
        whole, some = first(make(batch, numbers, 3)), first(make(part, numbers[2:5], 3))
        assert torch.equal(whole[2:5], some)
        assert not torch.equal(whole, first(batch))
        assert not torch.equal(whole, first(make(batch, numbers, 2)))
    assert first(views.light(batch, numbers, 0)) is first(batch)


def first(batch: Any) -> torch.Tensor:
    return batch["input_ids"] if isinstance(batch, dict) else batch[0]


def test_settings_are_one_object_and_arguments_win():
    settings = Settings(epochs=3, learning_rate=1e-3, distill=1.0, views=2, outlier_weight=0.5)
    student = train([teacher(0)], settings=settings, epochs=1, learning_rate=None)
    assert student.record["settings"]["epochs"] == 1
    assert student.record["settings"]["learning_rate"] == 1e-3
    for bad in ({"views": 0}, {"trunk_rate": -1}, {"teacher_temperature": 0}, {"distill": 2}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Settings(**bad)


def test_what_cannot_teach_is_refused(tmp_path):
    class Random:
        def __iter__(self) -> Any:
            return iter([(torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))])

    with pytest.raises(DataError, match="no teachers"):
        train([])
    with pytest.raises(DataError, match="does not exist"):
        train([tmp_path / "nothing"])
    with pytest.raises(DataError, match="rows, but the data has 32"):
        train([tables()[0][:5]], ood=None)
    with pytest.raises(DataError, match="differs when it is read again"):
        train([teacher(0)], Random())
    with pytest.raises(DataError, match="NaN"):
        train([torch.full((COUNT, 5), math.nan)], ood=None)
    with pytest.raises(ValueError, match='"auto"'):
        train([teacher(0)], ood="proxies")


def test_teachers_of_other_classes_are_refused_before_training(tmp_path):
    other = copy.deepcopy(model())
    other.classifier = nn.Linear(other.classifier.in_features, 7)
    wide, narrow = torch.full((COUNT, 7), 1 / 7), torch.ones(COUNT, 1)
    steps: list[Any] = []
    for given, found in ((other, 7), (wide, 7), (narrow, 1), ([teacher(0), wide], 7)):
        with pytest.raises(DataError, match=f"{found} classes, but the model to teach has 5"):
            train(given, ood=None, views=1, on_step=steps.append)
    assert not steps


def test_a_broken_teacher_is_named():
    broken = copy.deepcopy(teacher(1))
    with torch.no_grad():
        broken.classifier.bias[2] = math.nan
    with pytest.raises(DataError, match=r"teacher 1 \(ViT\w+\) to the data hold NaN"):
        train([teacher(0), broken], ood=None, views=1)
    with pytest.raises(DataError, match=r"teacher 0 \(<lambda>\) gave 8 answers for 32"):
        train([lambda images: torch.full((2, 5), 0.2)], ood=None, views=1)


def test_lists_of_modules_and_named_teachers_are_as_many_teachers():
    teachers = [teacher(place) for place in range(3)]
    options: dict[str, Any] = {"ood": None, "views": 1, "epochs": 1, "calibrate": False}
    whole = train(teachers, **options)
    named = dict(zip("abc", teachers, strict=True))
    assert largest_difference(whole, train(nn.ModuleList(teachers), **options)) == 0
    assert largest_difference(whole, train(named, **options)) == 0
    with pytest.raises(DataError, match="Teacher 0 is a NoneType"):
        train(None)


def test_a_share_of_labels_needs_labels_that_fit():
    """Without labels nothing may be learnt from zeros in their place."""
    inputs = [x for x, _ in data()]
    options: dict[str, Any] = {"settings": replace(DISTILL, distill=0.7), "ood": None}
    with pytest.raises(DataError, match=r"distill=0.7 .* 0.3 .* no labels"):
        train([teacher(0)], inputs, **options)
    with pytest.raises(DataError, match="A batch has no labels"):
        train([teacher(0)], [*data()[:1], *inputs[1:]], **options)
    with pytest.raises(DataError, match=r"float32 of shape \[8, 5\]"):
        train([teacher(0)], [(x, torch.full((8, 5), 0.2)) for x in inputs], **options)
    with pytest.raises(DataError, match="the model has 5 classes"):
        train([teacher(0)], [(x, y + 3) for x, y in data()], **options)
    assert train([teacher(0)], inputs, ood=None, views=1, epochs=1).members == 3


@pytest.mark.parametrize("name", ["data", "validation", "ood"])
def test_what_can_be_read_once_is_refused_by_its_name(name):
    batches = (batch for batch in data())
    with pytest.raises(DataError, match=f"{name!r} is a generator that can be read only once"):
        distill(model(), [teacher(0)], **{"data": data(), "progress": False, name: batches})


def test_half_precision_and_bootstraps_leave_float_weights():
    options: dict[str, Any] = {"epochs": 1, "views": 1}
    full = train([teacher(0)], **options)
    half = train([teacher(0)], mixed_precision="bf16", **options)
    drawn = train([teacher(0)], settings=Settings(distill=0.5, bootstrap=True), **options)
    assert all(p.dtype == torch.float32 for p in half.parameters())
    assert 0 < largest_difference(full, half) < 0.1
    assert largest_difference(full, drawn) > 0
    assert "taught   by 1 teacher: 4 steps" in str(full)


def test_loaders_teach_as_lists_do():
    images, labels = (torch.cat(parts) for parts in zip(*data(), strict=True))
    options: dict[str, Any] = {"ood": None, "views": 1}
    whole = train([teacher(0), teacher(1)], **options)
    ours = train([teacher(0), teacher(1)], as_data((images, labels), batch_size=8), **options)
    assert largest_difference(whole, ours) == 0


def test_teachers_are_asked_only_for_views_that_are_used(tmp_path):
    train([teacher(0)], epochs=2, views=4, folder=tmp_path)
    names = {path.name for path in (tmp_path / "answers").glob("*.npy")}
    assert names == {
        f"teacher-0-{part}-{view}.npy" for part in ("data", "outliers") for view in (0, 1)
    }


def test_what_a_loader_drops_in_order_is_answered_too():
    images, labels = (torch.cat(parts) for parts in zip(*data(), strict=True))
    dataset = TensorDataset(images[:30], labels[:30])
    loader = DataLoader(dataset, batch_size=8, drop_last=True)
    student = train([teacher(0), teacher(1)], loader, validation=data(), epochs=3)
    assert student.record["examples"]["data"] == 30


def test_settings_without_a_share_for_teachers_are_refused():
    with pytest.raises(ValueError, match="DISTILL"):
        distill(model(), [teacher(0)], data(), settings=Settings(trunk_rate=1.0))


def test_a_folded_start_gives_the_folded_answers_and_training_goes_on_from_there() -> None:
    batches = [(zoo.batch("vit", 40, seed=place), torch.arange(40) % 5) for place in range(5)]
    start = model()
    teachers = []
    for place in range(3):  # fine-tunings of one start
        noisy = copy.deepcopy(start)
        generator = torch.Generator().manual_seed(place)
        with torch.no_grad():
            for parameter in noisy.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.1 * noise * parameter.std())
        teachers.append(noisy)
    folded = hydra.fold(teachers, batches, student=False, progress=False)
    options = {"members": 3, "max_cost": 1.0, "seed": 0, "progress": False}
    begun = folded_start(teachers, batches, **options)
    inputs = zoo.batch("vit", 16, seed=99)
    expected = folded.predict(inputs).member_logits
    assert begun.predict(inputs).member_logits.equal(expected)
    trained = distill(
        start,
        teachers,
        batches,
        start="folded",
        max_cost=1.0,
        validation=batches[:1],
        settings=replace(DISTILL, epochs=2, learning_rate=1e-3, views=1),
        ood=None,
        novelty=False,
        progress=False,
    )
    hydra.verify(trained, inputs)
    assert trained.record["cost"] == pytest.approx(folded.record["cost"])
    assert trained.record["fold"]["members"] == folded.record["members"]
    assert "folded   from 3 hosts" in str(trained) and "taught   by 3 teachers" in str(trained)
    seen = batches[0][0]
    aims = torch.stack([zoo.run(teacher, seen) for teacher in teachers], 1).log_softmax(-1)
    trained.temperature = None

    def distance(ensemble: hydra.HydraEnsemble) -> float:
        answer = ensemble.predict(seen).member_logits.log_softmax(-1)
        return float((aims.exp() * (aims - answer)).sum(-1).mean())

    assert distance(trained) < distance(folded)


def test_a_folded_start_refuses_what_it_cannot_fold() -> None:
    with pytest.raises(DataError, match="one model per member"):
        distill(model(), [teacher(0)], data(), start="folded", progress=False)
    with pytest.raises(DataError, match="members, and found function"):
        distill(model(), [lambda inputs: inputs], data(), start="folded", members=1, progress=False)
    with pytest.raises(ValueError, match="no masks"):
        distill(model(), [teacher(0)], data(), start="folded", masks=MASKS, progress=False)
    with pytest.raises(KeyError, match="Did you mean 'folded'"):
        distill(model(), [teacher(0)], data(), start="fold", progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("epochs", "views"), [(1, 1), (2, 2), (6, 4)])
def test_teachers_are_asked_only_for_views_that_are_seen(epochs, views):
    source, asked = teacher(0), []

    def counted(inputs):
        asked.append(len(inputs))
        return source(inputs)

    train([counted], ood=None, views=4, epochs=epochs, members=1, masks=MASKS[:1], calibrate=False)
    assert sum(asked) - 32 <= 32 * views  # at most one more pass: the validation data
    assert sum(asked) >= 32 * views
