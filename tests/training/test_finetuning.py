"""Fine-tuning: reproducible, resumable, and doing what each argument says."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hydra_ensembles.errors import DataError, FormatError, HydraError
from hydra_ensembles.training import FINETUNE, Settings, finetune
from hydra_ensembles.training.checkpoint import FILE_NAME, read_checkpoint
from hydra_ensembles.training.loop import schedule
from hydra_ensembles.training.sample_order import Stream
from tests.training.arguments import arguments


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3)
        )


def batches(
    count: int = 100, size: int = 16, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    labels = inputs[:, :3].argmax(1)
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


class Stop(Exception):
    pass


def stop_at(step: int):
    def on_step(info):
        if info.step == step:
            raise Stop

    return on_step


def test_it_learns_and_leaves_the_model_alone():
    model, data = network(), batches()
    before = weights(model)
    member = finetune(model, data, epochs=8, learning_rate=1e-2, validation=batches(seed=1))[0]
    assert member.history[-1]["accuracy"] > 0.8 > member.history[0]["accuracy"]
    assert member.history[-1]["loss"] < member.history[0]["loss"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not member.model.training
    assert member.steps == 8 * len(data)
    assert json.loads(json.dumps(member.to_dict()))["seed"] == 0


def test_global_random_state_neither_matters_nor_changes():
    data = batches()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = finetune(network(), data, learning_rate=1e-2)[0]
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    second = finetune(network(), data, learning_rate=1e-2)[0]
    other = finetune(network(), data, learning_rate=1e-2, seed=1)[0]
    assert same(first.model, second.model)
    assert not same(first.model, other.model)


@pytest.mark.parametrize("stop", [3, 7, 12, 21])  # before a save, at an epoch's end, between, late
@pytest.mark.parametrize("keep", ["last", "best"])
def test_a_stopped_run_ends_bit_identical(tmp_path, stop, keep):
    data = batches()
    settings = {
        "epochs": 3,
        "learning_rate": 2e-2,
        "validation": batches(seed=1),
        "settings": Settings(towards_host=0.1, bootstrap=True, keep=keep),
        "save_every": 2,
        "folder": tmp_path / "stopped",
    }
    whole = finetune(network(), data, **{**settings, "folder": None})[0]
    with pytest.raises(Stop):
        finetune(network(), data, on_step=stop_at(stop), **settings)
    seen = []
    resumed = finetune(network(), data, on_step=seen.append, **settings)[0]
    assert len(seen) < 21 - (stop // 2 * 2 - 1)
    assert same(whole.model, resumed.model)
    assert whole.history == resumed.history
    again = finetune(network(), data, on_step=lambda info: pytest.fail("trained again"), **settings)
    assert same(whole.model, again[0].model)


def test_several_members_resume_where_the_last_one_stopped(tmp_path):
    data, seeds = batches(), [5, 9]
    whole = finetune(network(), data, seed=seeds, learning_rate=1e-2)

    def stop(info):
        if info.member == 1 and info.step == 4:
            raise Stop

    with pytest.raises(Stop):
        finetune(
            network(),
            data,
            seed=seeds,
            learning_rate=1e-2,
            folder=tmp_path,
            on_step=stop,
            save_every=3,
        )
    seen = []
    resumed = finetune(
        network(), data, seed=seeds, learning_rate=1e-2, folder=tmp_path, on_step=seen.append
    )
    assert [(info.member, info.step) for info in seen] == [(1, step) for step in (4, 5, 6, 7)]
    assert all(same(a.model, b.model) for a, b in zip(whole, resumed, strict=True))
    assert [member.seed for member in resumed] == seeds


def test_a_kill_while_writing_leaves_the_last_checkpoint_whole(tmp_path):
    settings = {"learning_rate": 1e-2, "epochs": 2, "folder": tmp_path, "save_every": 2}
    with pytest.raises(Stop):
        finetune(network(), batches(), on_step=stop_at(4), **settings)
    (tmp_path / "member-0" / f"{FILE_NAME}.partial").write_bytes(b"half a file")
    resumed = finetune(network(), batches(), **settings)[0]
    whole = finetune(network(), batches(), **{**settings, "folder": None})[0]
    assert same(whole.model, resumed.model)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    finetune(network(), batches(), folder=tmp_path)
    with pytest.raises(FormatError, match=r"learning_rate was 5e-05, is 0\.1"):
        finetune(network(), batches(), folder=tmp_path, learning_rate=0.1)
    with pytest.raises(FormatError, match="weights have changed"):
        finetune(network(seed=1), batches(), folder=tmp_path)
    file = tmp_path / "member-0" / FILE_NAME
    file.write_bytes(pickle.dumps({"not": "ours"}))
    with pytest.raises(FormatError, match="not a training checkpoint"):
        finetune(network(), batches(), folder=tmp_path)


def test_a_finished_checkpoint_drops_the_optimizer(tmp_path):
    finetune(network(), batches(), folder=tmp_path)
    saved = read_checkpoint(tmp_path / "member-0")
    assert saved is not None
    assert not [name for name in saved[0] if name.startswith("optimizer/")]


@pytest.mark.parametrize(
    "choice", [r"^4\.", lambda name, parameter: name.startswith("4.")], ids=["regex", "function"]
)
def test_only_chosen_parameters_move(choice):
    model = network()
    model[0].bias.requires_grad_(False)
    trained = finetune(model, batches(), learning_rate=1e-2, parameters=choice)[0]
    moved = {
        n for n, p in trained.model.named_parameters() if not torch.equal(p, model.get_parameter(n))
    }
    assert moved == {"4.weight", "4.bias"}
    assert trained.trained_parameters == 24 * 3 + 3
    flags = {name: p.requires_grad for name, p in trained.model.named_parameters()}
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}


def test_parameters_that_require_no_gradient_stay_by_default():
    model = network()
    model[0].requires_grad_(False)
    trained = finetune(model, batches(), learning_rate=1e-2)[0].model
    assert torch.equal(trained[0].weight, model[0].weight)
    assert not torch.equal(trained[4].weight, model[4].weight)


def test_the_pull_towards_the_host_keeps_weights_near():
    model, data = network(), batches()

    def distance(strength):
        settings = Settings(
            epochs=4,
            learning_rate=1e-2,
            weight_decay=0.0,
            max_grad_norm=math.inf,
            towards_host=strength,
        )
        trained = finetune(model, data, settings=settings)[0].model
        return sum(
            (a - b).square().sum().item()
            for a, b in zip(trained.parameters(), model.parameters(), strict=True)
        )

    assert distance(10.0) < 0.2 * distance(0.0)


def test_one_step_is_adamw_on_the_smoothed_loss():
    model, data = network(), batches(count=16)
    model[3].p = 0.0
    trained = finetune(
        model,
        data,
        settings=Settings(label_smoothing=0.2, warmup=0.0, max_grad_norm=math.inf),
        learning_rate=1e-2,
    )[0]
    by_hand = copy.deepcopy(model).train()
    logits = by_hand(data[0][0])
    smooth = torch.full_like(logits, 0.2 / 3)
    smooth[torch.arange(16), data[0][1]] += 0.8
    loss = -(smooth * logits.log_softmax(1)).sum(1).mean()
    loss.backward()
    matrices = [p for p in by_hand.parameters() if p.ndim > 1]
    vectors = [p for p in by_hand.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2).step()
    assert trained.history[0]["loss"] == pytest.approx(loss.item(), abs=1e-6)
    for ours, theirs in zip(trained.model.parameters(), by_hand.parameters(), strict=True):
        # gradients that vanish exactly (the bias before a norm) are rounding noise to Adam
        if ours.shape != model[0].bias.shape or ours is not trained.model[0].bias:
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_probabilities_as_labels_distil_a_teacher():
    hard = batches()
    soft = [(x, nn.functional.one_hot(y, 3).float()) for x, y in hard]
    given, taught = finetune(network(), hard)[0], finetune(network(), soft)[0]
    for one, other in zip(given.model.parameters(), taught.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    with pytest.raises(DataError, match="class numbers"):
        finetune(network(), hard, validation=soft)


def test_the_schedule_rises_then_falls():
    factors = [schedule(step, 20, 0.25) for step in range(20)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5] == 1.0
    assert factors[-1] == pytest.approx(1 / 15)
    assert factors[5:] == sorted(factors[5:], reverse=True)


def test_keep_best_returns_the_epoch_of_lowest_validation_nll():
    noisy = [(x, y.flip(0)) for x, y in batches(count=48)]  # wrong labels: training only hurts
    settings = Settings(epochs=6, learning_rate=3e-2, warmup=0.0)
    validation, best_epoch = batches(seed=1), replace(settings, keep="best")
    best = finetune(network(), noisy, settings=best_epoch, validation=validation)[0]
    last = finetune(network(), noisy, settings=settings, validation=validation)[0]
    lowest = min(best.history, key=lambda entry: entry["nll"])

    def nll(model):
        with torch.no_grad():
            pairs = [
                nn.functional.cross_entropy(model(x), y, reduction="sum")
                for x, y in batches(seed=1)
            ]
        return (sum(pairs) / 100).item()

    assert nll(best.model) == pytest.approx(lowest["nll"], abs=1e-5)
    assert nll(last.model) == pytest.approx(last.history[-1]["nll"], abs=1e-5)
    assert lowest["nll"] < last.history[-1]["nll"]


def test_a_custom_loss_sees_the_member_axis():
    shapes = set()

    def loss(logits, labels):
        shapes.add((logits.shape[1:], labels.ndim))
        return (logits[:, 0].argmax(1) == labels).float().mean() * 0 + logits.square().mean()

    trained = finetune(network(), batches(), epochs=10, learning_rate=3e-2, loss=loss)[0]
    assert shapes == {((1, 3), 1)}
    assert trained.history[-1]["loss"] < 0.3 * trained.history[0]["loss"]


class TwoMembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList([network(0), network(1)])

    def forward(self, inputs):
        return torch.stack([member(inputs) for member in self.members], 1)


def test_members_side_by_side_train_as_the_mean_of_their_losses():
    trained = finetune(TwoMembers(), batches(), epochs=6, learning_rate=1e-2, validation=batches())[
        0
    ]
    assert trained.history[-1]["accuracy"] > 0.7
    start = TwoMembers().members
    assert not same(trained.model.members[0], start[0])
    assert not same(trained.model.members[1], start[1])


def test_hugging_face_and_timm_hosts_train():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        bert = BertForSequenceClassification(config)
        ids = [torch.randint(1, 30, (8, length)) for length in (4, 6)]
    data = [
        {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": i[:, 0] % 2} for i in ids
    ]
    history = finetune(bert, data, epochs=15, learning_rate=1e-2)[0].history
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]

    timm = pytest.importorskip("timm")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vit = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=1, num_heads=2, num_classes=2
        )
        images = torch.randn(16, 3, 32, 32)
    data = [(images, (images.mean((1, 2, 3)) > 0).long())]
    history = finetune(vit, data, epochs=15, learning_rate=1e-2)[0].history
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]


def test_a_fused_branch_trains_by_its_members_losses():
    from transformers import BertConfig, BertForSequenceClassification

    from hydra_ensembles.fusion.fuse_members import fuse
    from hydra_ensembles.heads.head_mask import HeadMask

    config = BertConfig(
        vocab_size=30,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=16,
        num_labels=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        host = BertForSequenceClassification(config).eval()
        ids = torch.randint(1, 30, (32, 5))
    masks = [HeadMask([[1, 1, 1], kept]) for kept in ([1, 0, 0], [0, 1, 1])]
    ensemble = fuse(host, masks).untie_().freeze_trunk_()
    data = [{"input_ids": i, "labels": i[:, 0] % 2} for i in ids.split(8)]
    trained = finetune(ensemble, data, settings=Settings(learning_rate=1e-2, label_smoothing=0.1))[
        0
    ]

    moved = {
        name
        for name, value in trained.model.named_parameters()
        if not torch.equal(value, ensemble.get_parameter(name))
    }
    assert moved == {name for name, p in ensemble.named_parameters() if p.requires_grad}
    assert any(".branch." in name for name in moved)
    assert not any("embeddings" in name for name in moved)
    with torch.no_grad():
        together = trained.model.member_logits(data[0])
        alone = [trained.model.member(m)(data[0]["input_ids"]).logits for m in range(2)]
    torch.testing.assert_close(together, torch.stack(alone, 1), atol=1e-5, rtol=0)


def test_bf16_trains_and_leaves_accelerate_as_it_was():
    from accelerate.state import AcceleratorState

    data, settings = batches(), Settings(epochs=6, learning_rate=1e-2)
    half = finetune(network(), data, settings=replace(settings, mixed_precision="bf16"))[0]
    full = finetune(network(), data, settings=settings)[0]
    assert AcceleratorState._shared_state == {}
    assert half.history[-1]["loss"] == pytest.approx(full.history[-1]["loss"], abs=0.05)
    assert not same(half.model, full.model)
    assert all(p.dtype == torch.float32 for p in half.model.parameters())
    assert half.model(data[0][0]).dtype == torch.float32
    assert "forward" not in vars(half.model)


# -- the order of the data ---------------------------------------------------------------------


def rows(stream: Stream, epoch: int = 0) -> list[list[int]]:
    return [batch[0].tolist() for batch in stream.epoch(epoch)]


def flat(lists: list[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


def numbered(sizes: tuple[int, ...] = (4, 4, 3)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    numbers = torch.arange(sum(sizes))
    return [(part, part) for part in numbers.split(list(sizes))]


def test_samples_of_equal_batches_are_dealt_anew_each_epoch():
    stream = Stream(numbered(), seed=3)
    first, second = rows(stream, 0), rows(stream, 1)
    assert [len(batch) for batch in first] == [4, 4, 3]
    assert sorted(flat(first)) == list(range(11)) == sorted(flat(second))
    assert first != second
    assert first == rows(Stream(numbered(), seed=3), 0) != rows(Stream(numbered(), seed=4), 0)
    assert {frozenset(batch) for batch in first} != {frozenset(b[0].tolist()) for b in numbered()}


def test_a_small_first_batch_loses_no_samples():
    stream = Stream(numbered((1, 4, 4, 2)), seed=3)
    assert len(stream) == 3 == len(rows(stream))
    assert sorted(flat(rows(stream))) == list(range(11))
    drawn = Stream(numbered((1, 4, 4, 2)), seed=3, bootstrap=True)
    assert len(drawn) == 3 and [len(batch) for batch in rows(drawn)] == [4, 4, 3]


def test_ragged_batches_keep_their_content():
    data = [{"input_ids": torch.full((2, length), length)} for length in (2, 3, 4, 5, 6, 7)]
    order = [batch["input_ids"].shape[1] for batch in Stream(data, seed=0).epoch(0)]
    assert sorted(order) == [2, 3, 4, 5, 6, 7] != order
    drawn = list(Stream(numbered((4, 4)), seed=0, shuffle=False).epoch(0))
    assert [batch[0].tolist() for batch in drawn] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("kind", ["pooled", "ragged", "loader"])
def test_a_bootstrap_is_one_draw_a_seed_with_labels_attached(kind):
    def stream(seed):
        if kind == "loader":
            numbers = torch.arange(20)
            data = DataLoader(TensorDataset(numbers, numbers), batch_size=5)
        elif kind == "ragged":
            data = [
                (
                    torch.arange(10 * i, 10 * i + 10)[:, None].repeat(1, i + 1),
                    torch.arange(10 * i, 10 * i + 10),
                )
                for i in range(2)
            ]
        else:
            data = numbered((5, 5, 5, 5))
        return Stream(data, seed=seed, bootstrap=True)

    def drawn(seed, epoch):
        pairs = list(stream(seed).epoch(epoch))
        for inputs, labels in pairs:
            assert torch.equal(inputs.view(len(labels), -1)[:, 0], labels)
        return sorted(torch.cat([labels for _, labels in pairs]).tolist())

    assert drawn(0, 0) == drawn(0, 1) != drawn(1, 0)
    assert len(drawn(0, 0)) == 20 > len(set(drawn(0, 0)))


def test_a_loader_is_given_a_seeded_sampler():
    data = TensorDataset(torch.arange(10), torch.arange(10))
    for shuffle in (False, True):
        loader = DataLoader(data, batch_size=3, shuffle=shuffle)
        first = rows(Stream(loader, seed=0))
        torch.manual_seed(len(first))
        assert first == rows(Stream(loader, seed=0)) != rows(Stream(loader, seed=1))
        assert sorted(flat(first)) == list(range(10))
    assert len(Stream(DataLoader(data, batch_size=3, drop_last=True), seed=0)) == 3


class Own:
    """Data with its own order and no length."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        yield from batches()


def test_other_data_keeps_its_order_and_is_told_the_epoch():
    data = Own()
    finetune(network(), data, epochs=2)
    assert data.epochs == [0, 1]
    assert len(Stream(data, seed=0)) == len(batches())
    with pytest.raises(DataError, match="cannot resample a Own"):
        Stream(data, seed=0, bootstrap=True)


# -- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no batches"),
        (iter(batches()), "read only once"),
        ([batch[0] for batch in batches()], "no labels"),
        ([(x, y + 5) for x, y in batches()], "has 3 classes"),
        ([(x, y[:2]) for x, y in batches()], r"2 labels for \d+ answers"),
        ([(x, y.float()) for x, y in batches()], "class numbers .* as integers"),
        ([(x, torch.full((len(y), 3), 0.9)) for x, y in batches()], "not probabilities"),
    ],
)
def test_bad_data_is_named(data, message):
    with pytest.raises(DataError, match=message):
        finetune(network(), data)


def test_a_lying_length_is_an_error():
    class Lying(Own):
        def __len__(self):
            return 99

    with pytest.raises(DataError, match="99 batches that it announced"):
        finetune(network(), Lying())


def test_a_loss_that_is_not_a_number_stops_the_run():
    data = [(x * float("nan"), y) for x, y in batches()]
    with pytest.raises(HydraError, match="loss became nan at step 0"):
        finetune(network(), data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "1 or more"),
        ({"warmup": 1.0}, "share of the steps"),
        ({"keep": "first"}, "first"),
        ({"keep": "best"}, "needs validation"),
        ({"mixed_precision": "int4"}, "int4"),
        ({"seed": []}, "0 members"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        finetune(network(), batches(), **arguments(FINETUNE, options))


def test_members_and_seeds_must_match():
    with pytest.raises(ValueError, match="2 members but 3 seeds"):
        finetune([network(), network()], batches(), seed=[0, 1, 2])
    trained = finetune([network(), network()], batches(), seed=4)
    assert [member.seed for member in trained] == [4, 5]


def test_nothing_to_train_is_an_error():
    with pytest.raises(HydraError, match="No parameter of Sequential"):
        finetune(network(), batches(), parameters="no such name")
