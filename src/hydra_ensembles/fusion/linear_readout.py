"""Linear readouts: logits that are linear in what the last block computes at the readout.

Let u be the activations of all neurons of the last block's MLP at the tokens that the classifier
reads, and a the state that enters the MLP's residual sum. An output is z = [u, a] W + b. The
features [u, a] are by-products of the one forward pass: hooks on the last block give them to the
collector of the running call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import move, split_batch
from ..data.eval_mode import twin
from ..data.model_runs import device_of
from ..errors import UnsupportedModelError
from ..heads.stream_plan import Plan
from ..hosts import Family, host_model
from ..hosts.block import Block
from ..hosts.block_calls import parameter_names, take_rows
from ..hosts.probes import Pooling, Readout
from .call_options import running_call, set_options


class LinearReadout(nn.Module):
    """Linear maps from the readout's features to logits, one per output.

    Attributes:
        weight: `[output, class, feature]`.
        bias: `[output, class]`.
    """

    def __init__(self, outputs: int, classes: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, classes, features))
        self.bias = nn.Parameter(torch.zeros(outputs, classes))

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> LinearReadout:
        """Make a readout of given weights."""
        readout = cls(*weight.shape)
        readout.weight, readout.bias = nn.Parameter(weight), nn.Parameter(bias)
        return readout

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits `[batch, output, class]` of features `[batch, feature]`.

        The weights keep three axes: an 8-bit program leaves them in full precision, since neurons
        and states differ in size too much for one scale.
        """
        return (features @ self.weight.mT).transpose(0, 1) + self.bias


class Readouts(nn.Module):
    """The linear readouts of an ensemble, and where their features are.

    Attributes:
        second: Path of the last linear layer of the last block's MLP, inside the block.
        pooling: Which tokens are averaged, for a host that reads all of them.
        members: The members' logits; None where members are hosts.
        student: One output that answers for the ensemble; None without.
    """

    def __init__(
        self,
        second: str,
        *,
        members: LinearReadout | None = None,
        student: LinearReadout | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        super().__init__()
        self.second, self.pooling = second, pooling
        self.members, self.student = members, student

    def forward(self, features: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return logits: the members' `[batch, member, class]`, the student's `[batch, class]`."""
        members = None if self.members is None else self.members(features)
        return members, None if self.student is None else self.student(features)[:, 0]

    def collector(
        self, plan: Plan, readout: Readout, positions: Tensor | None, mask: Tensor | None
    ) -> FeatureCollector:
        """Return what takes the features of one call.

        Args:
            plan: The plan of the ensemble.
            readout, positions, mask: See `FeatureCollector`.
        """
        few = plan.layers[-1].readout_only
        return FeatureCollector(readout, self.pooling, positions=positions, mask=mask, few=few)


def refuse_readouts(members: LinearReadout | None) -> None:
    """Raise if members are linear readouts, which no plain host computes."""
    if members is not None:
        raise UnsupportedModelError(
            'The members are linear readouts of one trunk (fold(readout="logits")), not hosts. '
            'Their logits are in member_logits; fold with readout="states" for members that are '
            "plain hosts."
        )


class FeatureCollector:
    """Collects the features of one call.

    Args:
        readout: Which tokens the classifier reads.
        pooling: How tokens are averaged, if it reads all of them.
        positions: The readout token of each sample `[batch]`, where it depends on the sample.
        mask: True or 1 where a token is not padding, `[batch, tokens]`; None without padding.
        few: Whether the last block runs for the readout tokens only.
    """

    def __init__(
        self,
        readout: Readout,
        pooling: Pooling | None = None,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        few: bool = False,
    ) -> None:
        self._take = None if few else take_rows(readout.tokens, positions)
        self._pooling, self._mask = pooling, mask
        self._state: Tensor | None = None
        self._streams = 1
        self._neurons: list[Tensor] = []

    def enter(self, state: Tensor, streams: int = 1) -> None:
        """Note the state that enters the residual sum of the last block's MLP.

        Args:
            state: `[streams * batch, tokens, width]`; the first stream is read.
            streams: Number of streams that are folded into the batch.
        """
        self._state, self._streams, self._neurons = state, streams, []

    def take(self, neurons: Tensor) -> None:
        """Note activations of the neurons; an MLP that runs in chunks of rows gives several."""
        self._neurons.append(neurons)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return u and a of the tokens that are read, `[batch, tokens, width]` each."""
        assert self._state is not None
        state, neurons = self._state, self._neurons[0]
        if len(self._neurons) > 1:
            neurons = torch.cat([part.flatten(0, -2) for part in self._neurons])
        return self.select(neurons.reshape(*state.shape[:-1], -1)), self.select(state)

    def select(self, x: Tensor) -> Tensor:
        """Return the tokens that are read of the first stream, from `[streams * batch, ...]`."""
        x = x.unflatten(0, (self._streams, -1))[0]
        return x if self._take is None else self._take(x)

    def real_tokens(self, tokens: Tensor) -> Tensor:
        """Return 1 where a token `[batch, tokens, width]` is real and 0 where it is padding."""
        if self._mask is None or self._mask.shape != tokens.shape[:2]:
            return torch.ones_like(tokens[..., 0])
        return self._mask.to(tokens.dtype)

    def features(self) -> Tensor:
        """Return the features `[batch, feature]`: [u, a] of every token read, or their mean."""
        tokens = torch.cat(self.rows(), -1)
        pooling = self._pooling
        if pooling is None:
            return tokens.flatten(1)
        weight = self.real_tokens(tokens)[:, pooling.start :, None]
        mean = (tokens[:, pooling.start :] * weight).sum(1) / weight.sum(1).clamp_min(1)
        return torch.cat([tokens[:, : pooling.own].flatten(1), mean], 1) if pooling.own else mean


def tap_(block: Block, second: str) -> None:
    """Let a plain block give its features to the running call, in place."""
    entering = block.norm2
    if block.family.norm == "post":
        entering = block.module.get_submodule(block.mlp_names[0])
    assert entering is not None
    _hook_once(entering, _note_state)
    _hook_once(block.module.get_submodule(second), _note_neurons)


class TappedHost:
    """A plain host that gives the features of linear readouts along with its output.

    Args:
        model: The host; a twin of it runs.
        family: Its family.
        readout: Which tokens its classifier reads.
        second: Path of the last linear layer of the last block's MLP, inside the block.
        pooling: How tokens are averaged, if the classifier reads all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        readout: Readout,
        second: str,
        pooling: Pooling | None = None,
    ) -> None:
        self.model = twin(model).eval()  # its own hooks and modes, the same tensors
        self.block = host_model(self.model, family=family).blocks[-1]
        self._readout, self._pooling = readout, pooling
        tap_(self.block, second)

    @torch.no_grad()
    def __call__(self, batch: Any) -> tuple[Any, FeatureCollector]:
        """Run a batch without its labels; return the host's output and what was collected."""
        args, kwargs, _ = split_batch(batch)
        device = device_of(self.model)
        args, kwargs = move(args, device), move(kwargs, device)
        inputs = {**dict(zip(parameter_names(self.model), args, strict=False)), **kwargs}
        find = self._readout.positions
        collector = FeatureCollector(
            self._readout,
            self._pooling,
            positions=None if find is None else find(inputs),
            mask=inputs.get("attention_mask"),
        )
        with set_options(self, features=collector):
            return self.model(*args, **kwargs), collector


def tap_neurons_(modules: Sequence[nn.Module], paths: Sequence[str], second: str) -> None:
    """Let the MLP of a fused block give its neurons to the running call, in place.

    Args:
        modules: The modules of the MLP.
        paths: Their paths in the host's block.
        second: The path of the last linear layer.
    """
    for module, path in zip(modules, paths, strict=True):
        if f"{second}.".startswith(f"{path}."):
            inner = second.removeprefix(path).removeprefix(".")
            _hook_once(module.get_submodule(inner), _note_neurons)


def _hook_once(module: nn.Module, hook: Callable[..., None]) -> None:
    """Register a hook unless the module has it: members share modules with the fused block."""
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook)


def _note_state(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    collector = running_call().features
    if collector is not None:
        collector.enter(inputs[0])


def _note_neurons(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    collector = running_call().features
    if collector is not None:
        collector.take(inputs[0])
