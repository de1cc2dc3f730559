"""The neurons of one block's MLP: where they are, found by running it, and their removal.

A neuron is one input of the MLP's last linear layer. It can be removed if it depends on rows of
linear layers that no other neuron depends on: one row of one layer, one row of each of two (a gate
and what it scales), or two rows of one packed layer. A norm over all neurons shows up as a
dependence on all rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import FormatError, MaskError, UnsupportedModelError
from .block import Block
from .block_calls import BlockCall
from .head_removal import HeadGate
from .head_weights import is_linear, linear_bias, linear_weight, set_linear_
from .probes import largest_difference, random_states, randomized
from .reasons import describe_modules

Run = Callable[[Block], Tensor]
"""Runs a block, or only its MLP, on random states."""

TOKENS = 4
"""Random states on which an MLP is run on its own."""

_CLOSED = "its MLP cannot be run on its own"

_WIDTHS = ("intermediate_size", "ffn_hidden_size", "hidden_features", "hidden_dim", "ffn_dim")
"""Attributes by which modules remember the number of their neurons."""


@dataclass(frozen=True)
class MlpSite:
    """The neurons of one block's MLP: u = act(...), and the linear layer that reads them.

    Attributes:
        layer: Number of the block.
        first: Paths inside the block of the linears whose outputs become neurons: one, or two of a
            gated MLP.
        packed: How many rows of one first linear a neuron has: 2 for a packed gate, else 1.
        second: Path of the linear whose inputs are the neurons.
        neurons: How many there are.
        interleaved: Whether the rows of a packed neuron are neighbours (0, 1, then 2, 3); else
            its parts lie side by side (0, n, then 1, n + 1).
    """

    layer: int
    first: tuple[str, ...]
    packed: int
    second: str
    neurons: int
    interleaved: bool = False

    def by_row(self) -> list[int]:
        """Return the neuron of each row of a first linear."""
        rows = range(self.packed * self.neurons)
        return [row // self.packed if self.interleaved else row % self.neurons for row in rows]

    def rows(self, kept: Collection[int]) -> list[int]:
        """Return the rows of a first linear that belong to some neurons, in order."""
        wanted = set(kept)
        return [row for row, neuron in enumerate(self.by_row()) if neuron in wanted]


def mlp_site(block: Block, call: BlockCall | None = None) -> MlpSite:
    """Find the neurons of a block by running its MLP on random states.

    Args:
        block: A block of a host.
        call: How the host calls it. An MLP that cannot be run on its own is then found by running
            the whole block.

    Raises:
        UnsupportedModelError: When they cannot be told apart or removed, with the reason.

    Example:
        >>> mlp_site(host_model(model).blocks[0])
        MlpSite(layer=0, first=('intermediate.dense',), packed=1, second='output.dense', ...)
    """
    found = find_neurons(block, call)
    if isinstance(found, str):
        raise UnsupportedModelError(f"The neurons of block {block.index} stay: {found}.")
    return found


def why_no_neurons(block: Block, call: BlockCall | None = None) -> str | None:
    """Say why a block's neurons cannot be removed, or None."""
    found = find_neurons(block, call)
    return found if isinstance(found, str) else None


def find_neurons(block: Block, call: BlockCall | None = None) -> MlpSite | str:
    """Return where a block's neurons are, proven by a removal, or why they stay."""
    if any("expert" in name.lower() for name, _ in block.module.named_modules()):
        return "its MLP is a mixture of experts, which stay whole"
    alone: MlpSite | str = "its family does not say where the MLP is"
    if block.mlp_names:
        alone = _find(block, _run_alone, _inside_mlp(block))
    if not isinstance(alone, str) or call is None:
        return alone
    given = random_states(call)
    args, kwargs = pytree.tree_map(_in_float64, given.given)
    given = replace(given, hidden=given.hidden.double(), args=args, kwargs=kwargs)
    found = _find(block, lambda probe: given.run(probe.module), _without_attention(block))
    return alone if isinstance(found, str) and not alone.startswith(_CLOSED) else found


def _inside_mlp(block: Block) -> dict[str, nn.Module]:
    """Return the modules of a block's MLP, by their paths."""
    names = tuple(f"{name}." for name in block.mlp_names)
    return {path: m for path, m in block.module.named_modules() if f"{path}.".startswith(names)}


def _in_float64(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floats else value


def _run_alone(block: Block) -> Tensor:
    """Run a block's MLP on random states."""
    like = linear_weight(block.attention.output)
    x = torch.randn(1, TOKENS, len(like), generator=torch.Generator().manual_seed(0)).to(like)
    for path in block.mlp_names:
        x = block.part(path)(x)
    return x


def _without_attention(block: Block) -> dict[str, nn.Module]:
    """Return the modules of a block that do not belong to its attention, by their paths."""
    site = block.attention
    owner = [] if site.module is block.module else list(site.module.modules())
    known = {*owner, site.output, site.packed, site.query, site.key, site.value}
    return {path: module for path, module in block.module.named_modules() if module not in known}


def _find(block: Block, run: Run, parts: Mapping[str, nn.Module]) -> MlpSite | str:
    """Find neurons among some parts of a block, run in one way, on random weights."""
    probe = Block.of(block.index, randomized(block.module).double(), block.family)
    try:
        site = _by_gradient(probe, run, [path for path, m in parts.items() if is_linear(m)])
    except Exception as error:
        line = str(error).strip().partition("\n")[0][:120]
        return f"{_CLOSED} ({type(error).__name__}: {line})"
    if isinstance(site, str):
        return site
    return _why_not_cut(probe, run, site) or site


def cut_neurons_(block: Block, kept: Sequence[int], site: MlpSite | None = None) -> None:
    """Remove all other neurons of a block physically, in place.

    The linear that reads them remembers where they were (`hydra_mlp`, a `MlpSite`), so that a host
    of the same shape can be built again.

    Args:
        block: A block of a host.
        kept: The neurons to keep, in order.
        site: Where its neurons are, if that is known.

    Example:
        >>> cut_neurons_(host_model(model).blocks[0], range(0, 1536, 2))
    """
    _cut_(block.module, site or mlp_site(block), kept)


def _cut_(root: nn.Module, site: MlpSite, kept: Sequence[int]) -> None:
    """Remove neurons below a module from which the paths of a site start."""
    if not kept or min(kept) < 0 or max(kept) >= site.neurons:
        raise MaskError(
            f"Block {site.layer} has the neurons 0 to {site.neurons - 1} but is to keep "
            f"{list(kept)[:8]}: keep at least one of them."
        )
    for path in site.first:
        linear = root.get_submodule(path)
        weight, bias = linear_weight(linear), linear_bias(linear)
        rows = torch.tensor(site.rows(kept), device=weight.device)
        set_linear_(linear, weight[rows], None if bias is None else bias[rows])
    second: Any = root.get_submodule(site.second)
    weight = linear_weight(second)
    set_linear_(second, weight[:, torch.tensor(kept, device=weight.device)], linear_bias(second))
    paths = [path.split(".") for path in (*site.first, site.second)]
    levels = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    shared = len(list(levels))  # what is above all of them depends on who looks
    *first, last = (".".join(path[shared:]) for path in paths)
    neurons = neurons_before(second, site.neurons)
    second.hydra_mlp = replace(site, first=tuple(first), second=last, neurons=neurons)
    for path in {path.rpartition(".")[0] for path in (*site.first, site.second)}:
        module = root.get_submodule(path)
        for name in _WIDTHS:
            if getattr(module, name, None) == site.neurons:
                setattr(module, name, len(kept))


def neurons_before(second: nn.Module, now: int) -> int:
    """Return how many neurons a linear read before any was removed."""
    site: MlpSite | None = getattr(second, "hydra_mlp", None)
    return now if site is None else site.neurons


def removed_neurons(model: nn.Module) -> list[dict[str, Any]]:
    """Describe, as plain data, in which MLPs of a model neurons were removed and how many stayed.

    Example:
        >>> removed_neurons(model)[0]["kept"]
        768
    """
    records = []
    for path, module in model.named_modules():
        site: MlpSite | None = getattr(module, "hydra_mlp", None)
        if site is not None:
            start = path.removesuffix(site.second)
            first = [f"{start}{name}" for name in site.first]
            record = {**asdict(site), "first": first, "second": path}
            records.append({**record, "kept": linear_weight(module).shape[1]})
    return records


def remove_neurons_(model: nn.Module, records: Sequence[dict[str, Any]]) -> None:
    """Remove as many neurons from a model as `removed_neurons` says, in place; any of them.

    Its weights are filled in afterwards. An MLP that has only the kept ones already stays.

    Raises:
        FormatError: When a record does not fit the model.
    """
    for record in records:
        try:
            values = {name: value for name, value in record.items() if name != "kept"}
            kept, site = record["kept"], MlpSite(**{**values, "first": tuple(values["first"])})
            linears = [model.get_submodule(path) for path in (*site.first, site.second)]
            shapes = [linear_weight(linear).shape for linear in linears if is_linear(linear)]
            there = shapes[-1][1]
            fits = len(shapes) == len(linears) and there in (kept, site.neurons)
            fits &= isinstance(kept, int) and 0 < kept <= site.neurons
            fits &= all(shape[0] == site.packed * there for shape in shapes[:-1])
        except (AttributeError, IndexError, KeyError, TypeError):
            fits = False
        if not fits:
            raise FormatError(
                f"The host does not have the neurons of which some were removed ({record!r:.120}). "
                "Save or download the folder again, or pass the host that it was made from."
            )
        if there != kept:
            _cut_(model, site, range(kept))


def grow_neurons_(block: nn.Module) -> None:
    """Give a block without storage as many neurons as it had before any was removed, in place."""
    for record in removed_neurons(block):
        for path in record["first"]:
            linear = block.get_submodule(path)
            rows, weight = record["packed"] * record["neurons"], linear_weight(linear)
            set_linear_(linear, weight.new_empty(rows, weight.shape[1]), weight.new_empty(rows))
        second: Any = block.get_submodule(record["second"])
        weight = linear_weight(second)
        set_linear_(second, weight.new_empty(len(weight), record["neurons"]), linear_bias(second))
        del second.hydra_mlp


@torch.enable_grad()
def _by_gradient(block: Block, run: Run, linears: Sequence[str]) -> MlpSite | str:
    """Find which rows of which linear layers move which inputs of the last linear layer."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)

    def note(path: str, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inputs[path] = given[0]
        # positive, so that no ReLU is off; what a linear depends on itself is of no use
        values = torch.rand(output.shape, generator=generator).to(output) + 0.5
        outputs[path] = values.requires_grad_()
        return values.clone()

    modules = {path: block.module.get_submodule(path) for path in linears}
    hooks = [m.register_forward_hook(partial(note, path)) for path, m in modules.items()]
    try:
        run(block)
    finally:
        for hook in hooks:
            hook.remove()
    if len(outputs) < 2:
        return "its MLP does not have two linear layers"
    second = list(outputs)[-1]  # in the order of their calls
    u = inputs[second]
    neurons = u.shape[-1]
    numbers = torch.arange(1, neurons + 1, dtype=u.dtype, device=u.device)
    moments = [(u * numbers**power).sum() for power in (0, 1, 2)]
    found: dict[str, Tensor] = {}
    for path, output in outputs.items():
        gradients = [
            torch.autograd.grad(m, output, retain_graph=True, allow_unused=True)[0] for m in moments
        ]
        if gradients[0] is not None:
            moved = _moved([g.flatten(0, -2).sum(0) for g in gradients])
            if moved is None:
                return (
                    f"its MLP has neurons that depend on each other{_parts_between(block, linears)}"
                )
            found[path] = moved
    return _as_site(block.index, found, second, neurons)


def _moved(gradients: Sequence[Tensor]) -> Tensor | None:
    """Return the one neuron that each row moves; None if some row moves none or several.

    Args:
        gradients: By rows, the gradients of the sums of u_j, u_j (j + 1) and u_j (j + 1)^2 over
            neurons j. Where a row moves only neuron j they are as 1 : j + 1 : (j + 1)^2.
    """
    mean, square = gradients[1] / gradients[0], gradients[2] / gradients[0]
    number = mean.round()
    single = (mean - number).abs().lt(1e-3) & (square / number - number).abs().lt(1e-3)
    return number.long() - 1 if bool(single.all()) else None


def _as_site(layer: int, moved: dict[str, Tensor], second: str, neurons: int) -> MlpSite | str:
    if not moved:
        return "its MLP ends with a linear layer that does not read what another one computes"
    for packed in {len(rows) // neurons for rows in moved.values()}:
        for interleaved in (False, True):
            site = MlpSite(layer, tuple(moved), packed, second, neurons, interleaved)
            if all(rows.tolist() == site.by_row() for rows in moved.values()):
                return site
    return "its MLP keeps its neurons in an order that we do not know"


@torch.no_grad()
def _why_not_cut(block: Block, run: Run, site: MlpSite) -> str | None:
    """Compare half of the neurons gated off with half of them removed, on random weights."""
    kept = list(range(0, site.neurons, 2))
    cut = Block.of(block.index, copy.deepcopy(block.module), block.family)
    row = torch.zeros(site.neurons)
    row[kept] = 1.0
    block.module.get_submodule(site.second).register_forward_pre_hook(HeadGate(row, 1))
    try:
        cut_neurons_(cut, kept, site)
        difference = largest_difference(run(cut), run(block))
    except Exception as error:
        line = str(error).strip().partition("\n")[0][:120]
        return f"its MLP needs all its neurons ({type(error).__name__}: {line})"
    if not difference <= 1e-5:
        return f"its MLP computes something else without some neurons (off by {difference:.2g})"
    return None


def _parts_between(block: Block, linears: Sequence[str]) -> str:
    """Name the other parts of an MLP that have weights, in brackets; nothing if there are none."""
    others = [
        f"{path}.{name}"
        for path in block.mlp_names
        for name, _ in block.module.get_submodule(path).named_parameters()
        if f"{path}.{name}".rpartition(".")[0] not in linears
    ]
    return f" ({describe_modules(others)})" if others else ""
