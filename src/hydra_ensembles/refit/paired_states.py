"""The states of two models of one architecture on the same data, block by block.

Only what enters one block is kept. Where the data is too large for that, the states of some batches
are computed again from their inputs for every block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..data import processes
from ..data.batches import check_inputs, move, split_batch
from ..data.eval_mode import twin
from ..data.model_runs import device_of
from ..data.processes import in_order, own_batches
from ..data.progress import Progress, announce, length_of
from ..errors import DataError, HydraError, UnsupportedModelError
from ..hosts import HostModel, host_model
from ..hosts.block_calls import (
    BlockCall,
    Inputs,
    capture_calls,
    parameter_names,
    stand_ins,
    why_not_chained,
)
from ..hosts.head_weights import linear_weight
from .sublayer import Sublayer, sublayers
from .token_sums import HELD_OUT, judges_among

STATES_BYTES = 4 * 2**30
"""Memory for states; batches beyond it are computed again from their inputs for every block."""
ROWS_PER_UNKNOWN = 2
"""In the last block only readout tokens are fitted if there are so many per unknown."""


@dataclass
class PairedBatch:
    """The states of one batch that enter a block, and what the host passes to its blocks.

    Attributes:
        calls: How the host calls each block; without states.
        dense, pruned: States [batch, tokens, width]; one object while they are equal.
        weights: 1 for tokens, 0 for padding [batch, tokens].
        read: The tokens that the classifier reads [batch, tokens]; None for all.
        judges: Which examples are held out [batch].
        ahead: What the dense block returns, once it is known.
    """

    calls: Sequence[BlockCall]
    dense: Tensor
    pruned: Tensor
    weights: Tensor
    read: Tensor | None
    judges: Tensor
    ahead: Tensor | None = None

    def bytes(self) -> int:
        """Count the bytes of its tensors; of views only the underlying memory."""
        leaves = pytree.tree_leaves([call.given for call in self.calls])
        stored = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
        arguments = {storage.data_ptr(): storage.nbytes() for storage in stored}
        return sum(arguments.values()) + 2 * self.dense.numel() * self.dense.element_size()


class PairedStates:
    """The states of all data in both models, block by block.

    Of several processes, each keeps the states of its own batches.
    """

    def __init__(self, dense: nn.Module, pruned: nn.Module, data: Any, seed: int) -> None:
        self.dense = host_model(twin(dense).eval())  # its own modes, the same tensors
        if self.dense.shares_layers:
            raise UnsupportedModelError(
                f"{self.dense.name} cannot be refitted: its layers share one set of weights."
            )
        self.pruned = host_model(
            twin(pruned).eval(), family=self.dense.family, facts=self.dense.facts
        )
        self.data, self.seed = data, seed
        self.sizes: list[int] = []
        self._read_rows = 0
        self._cache: dict[int, PairedBatch] = {}
        self._used = 0
        self._checks: dict[int, float] = {}
        self._first: list[BlockCall] | None = None
        if len(self.pruned) != len(self.dense):
            raise UnsupportedModelError(
                f"The models have {len(self.dense)} and {len(self.pruned)} blocks. Refit follows a "
                "model of the same architecture."
            )

    def read(self, bar: Progress, *, progress: bool) -> None:
        """Pass over the data once: run what comes before the blocks."""
        batches = length_of(self.data)

        def work(number: int, batch: Any) -> dict[str, Tensor]:
            where = f"batch {number} of the data"
            check_inputs(batch, where)
            try:
                entered = self._enter(batch)
            except HydraError:
                raise
            except Exception as error:
                raise DataError(
                    f"The model failed on {where} ({type(error).__name__}: {error}). Give inputs "
                    "as the model takes them."
                ) from error
            size = entered.bytes()
            if not self._used and batches:
                share = min(1.0, STATES_BYTES / max(1, size * batches))
                announce(
                    f"Refit needs about {size * batches * share / 2**30:.1f} GiB for the states of "
                    f"{share:.0%} of the data, and {self._sums_bytes() / 2**30:.1f} GiB for sums.",
                    enabled=progress and size * batches > 2**30,
                )
            if self._used + size <= STATES_BYTES:
                self._cache[number] = entered
                self._used += size
            self._checks[number] = float(entered.dense.double().sum())
            read = entered.read
            rows = 0 if read is None else int(read.sum())
            return {"size": torch.tensor(len(entered.dense)), "rows": torch.tensor(rows)}

        for result in in_order(self.data, work, name="data to refit on"):
            self.sizes.append(int(result["size"]))
            self._read_rows += int(result["rows"])
            bar.update()
        if not self.sizes:
            raise DataError("The data has no batches. Check the loader or the filter.")
        if sum(self.sizes) < HELD_OUT:
            raise DataError(
                f"The data has {sum(self.sizes)} examples, too few to hold some out. Give at least "
                f"{HELD_OUT}; a few thousand are best, and they need no labels."
            )
        for number, entered in self._cache.items():
            entered.judges = self._judges(number)

    def _judges(self, number: int) -> Tensor:
        start = [0, *accumulate(self.sizes)][number]
        return judges_among(start, self.sizes[number], self.seed)

    def _sums_bytes(self) -> int:
        """Return the bytes of the largest moments: fitted, judging, and a third for their sum."""
        units = max(
            max(p.shape) for b in self.pruned.blocks for p in b.module.parameters() if p.dim() > 1
        )
        return 3 * 8 * units * (units + self.dense.width)

    def _enter(self, batch: Any) -> PairedBatch:
        """Run what comes before the blocks of both models."""
        device = device_of(self.dense.model)
        args, kwargs, _ = split_batch(batch)
        inputs = move(args, device), move(kwargs, device)
        if self._first is None:
            self._first = self._observe(inputs)
        calls, others = (self._calls(host, inputs) for host in (self.dense, self.pruned))
        if [call.shape for call in calls] != [call.shape for call in others]:
            raise UnsupportedModelError(
                f"{self.dense.name} cannot be refitted: it passes something with one value per "
                "head to its blocks."
            )
        x, y = calls[0].hidden, others[0].hidden
        named = dict(zip(parameter_names(self.dense.model), inputs[0], strict=False)) | inputs[1]
        mask, read = named.get("attention_mask"), self._read_tokens(named, x)
        used = torch.ones(x.shape[:2], dtype=torch.bool)
        if isinstance(mask, Tensor) and mask.shape == used.shape:
            used = mask.cpu() > 0
        if read is not None:  # hosts may read a token that their mask leaves out
            used = used | read
        return PairedBatch(
            [replace(call, hidden=x[:0], output=None) for call in calls],
            x,
            x if x.equal(y) else y,
            used.double(),
            read,
            torch.zeros(len(x), dtype=torch.bool),
        )

    def _read_tokens(self, named: dict[str, Any], x: Tensor) -> Tensor | None:
        """Return the tokens that the classifier reads [batch, tokens]; None for all."""
        readout, places = self.dense.readout, torch.arange(x.shape[1])
        if readout.positions is not None:
            return places == readout.positions(named).cpu()[:, None]
        return None if readout.tokens is None else (places < readout.tokens).expand(len(x), -1)

    def _observe(self, inputs: Inputs) -> list[BlockCall]:
        """Run the dense model on a first batch; raise unless its blocks follow one another."""
        calls = capture_calls(self.dense, self.dense.blocks, inputs)
        reason = why_not_chained(calls)
        if reason is None and any(call.form.hands_on for call in calls):
            reason = "its blocks pass on more than their states"
        if reason is not None:
            raise UnsupportedModelError(
                f"{self.dense.name} cannot be refitted block by block: {reason}."
            )
        return calls

    def _calls(self, host: HostModel, inputs: Inputs) -> list[BlockCall]:
        """Return how a host calls its blocks; the blocks need not run where arguments are known."""
        if self.dense.why_not_fused() is not None:
            return capture_calls(host, host.blocks, inputs)
        calls: list[BlockCall] = []

        def answer(call: BlockCall) -> Tensor:
            calls.append(call)
            return call.hidden

        with stand_ins(host, answer, note=calls.append):
            host.model(*inputs[0], **inputs[1])
        return calls

    def sublayers(self, layer: int) -> list[Sublayer]:
        """Return the linear layers of a block that can be fitted."""
        assert self._first is not None
        return [
            one
            for one in sublayers(self.dense.blocks[layer], self._first[layer])
            if linear_weight(one.linear(self.pruned.blocks[layer])).shape[1]
        ]

    def alike(self, layer: int, part: str) -> bool:
        """Return whether states and weights are equal in both models up to this part."""
        if any(batch.pruned is not batch.dense for batch in self._cache.values()):
            return False
        if len(self._cache) < len(self.sizes) and layer:  # of the others nothing is known
            return False
        ours, theirs = (
            host.blocks[layer].module.state_dict() for host in (self.pruned, self.dense)
        )
        mlp = tuple(f"{name}." for name in self.dense.blocks[layer].mlp_names)
        names = [name for name in theirs if part == "mlp" or not name.startswith(mlp)]
        return all(name in ours and ours[name].equal(theirs[name]) for name in names)

    def weights(self, batch: PairedBatch, layer: int, unknowns: int) -> Tensor:
        """Return the weight of each token in a fit [batch, tokens]."""
        if batch.read is None or layer + 1 < len(self.dense):
            return batch.weights
        read = batch.read.double()
        if self._read_rows >= ROWS_PER_UNKNOWN * unknowns:
            return read
        others = batch.weights - read
        share = others.sum(1, keepdim=True) / read.sum(1, keepdim=True)
        return others + read * share.clamp_min(1)

    def over(self, layer: int, work: Callable[[PairedBatch], None], bar: Progress) -> None:
        """Call a function with the states of every own batch that enter a block."""
        own = self._own(layer)

        def one(number: int, _: Any) -> dict[str, Tensor]:
            work(next(own))
            return {}

        for _ in in_order(list(range(len(self.sizes))), one, name="states", ahead=1):
            bar.update()

    def _own(self, layer: int) -> Iterator[PairedBatch]:
        if len(self._cache) == len(processes.own_numbers(len(self.sizes))):
            yield from self._cache.values()
            return
        for number, batch in own_batches(self.data):
            entered = self._cache.get(number)
            if entered is None:
                entered = self._enter(batch)
                if float(entered.dense.double().sum()) != self._checks.get(number):
                    raise DataError(
                        f"The data gave other examples at a second reading (batch {number}). Use a "
                        "fixed order (shuffle=False)."
                    )
                entered.judges = self._judges(number)
                for below in range(layer):
                    self._step_(entered, below)
            yield entered

    def _step_(self, batch: PairedBatch, layer: int) -> None:
        """Run a block of both models."""
        call, same = batch.calls[layer], batch.pruned is batch.dense
        ours, theirs = (host.blocks[layer].module for host in (self.pruned, self.dense))
        dense = call.run(theirs, batch.dense) if batch.ahead is None else batch.ahead
        pruned = call.run(ours, batch.pruned)
        same = same and pruned.equal(dense)
        batch.dense, batch.pruned, batch.ahead = dense, dense if same else pruned, None

    def advance_(self, layer: int, bar: Progress) -> None:
        """Move up one block, for the batches whose states are kept."""
        for batch in self._cache.values():
            self._step_(batch, layer)
            bar.update(processes.size())
