"""Re-enacts in one process data ranks that do not simply average gradients, one after another.

With compression, the gradient of each data rank is compressed as on that rank; tensors that several
pipeline coordinates hold are summed uncompressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import nn

from parcompiler.data_updates import is_factored
from parcompiler.lower import Lowered
from parcompiler.pieces import rows
from parcompiler.runtime.compression import DTYPES, summed
from parcompiler.runtime.powersgd import first_factor
from parcompiler.verification.pool import Outcome
from parcompiler.verification.reference import Optimizer, Original

Gradients = dict[str, torch.Tensor]


class DataRanks:
    """Steps of the data ranks of a program, run on the original model."""

    def __init__(self, original: Original, lowered: Lowered, optimizer: Optimizer) -> None:
        self._original, self._lowered, self._make = original, lowered, optimizer
        self._weights = {name: p for name, p in original.masters.items() if p.requires_grad}
        self._optimizer = optimizer([*self._weights.values()]) if self._weights else None
        self._tied = {item.name for item in lowered.tied}
        spread = lowered.vocabulary
        self._rows = spread.tensors if spread else {}
        self._kept: dict[tuple[str, int], tuple[list[torch.Tensor], torch.Tensor]] = {}
        self.compression_error = 0.0

    def together(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> Outcome:
        """Steps with compressed gradients, one on each batch: mean losses, the gradients of the
        first step, and the state after the last. `compression_error` is that of the gradients."""
        original, first, means = self._original, Gradients(), []
        for batch in batches:
            with original.accumulating():
                losses, groups = self.gradients_of_ranks(batch)
                original.set_gradients(self.packed(groups))
            first = first or original.gradients()
            self.update()
            means.append(torch.stack(losses).mean())
        return Outcome(
            torch.stack(means), first, original.state(), original.scale,
            compression_error=self.compression_error,
        )  # fmt: skip

    def apart(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> Outcome:
        """Steps of data ranks that average their weights in rounds: losses, gradients of the first
        step and the state after the last, of the first data rank."""
        original, lowered, weights = self._original, self._lowered, self._weights
        others = range(1, lowered.data)
        ranks = [self, *(DataRanks(original, lowered, self._make) for _ in others)]
        updates, losses, first = lowered.updates, [], Gradients()
        rate, momentum = updates.outer
        anchors = {name: nn.Parameter(w.detach().clone()) for name, w in weights.items()}
        outer = torch.optim.SGD(anchors.values(), rate, momentum, nesterov=momentum > 0)
        each = [(_values(weights), original.updated()) for _ in ranks]
        for number, batch in enumerate(batches):
            for r, of_rank in enumerate(ranks):
                original.begin(each[r][1])
                loss, gradients = self.step_of(r, batch, each[r][0])
                first = first or gradients
                losses += [loss] if r == 0 else []
                of_rank.update()
                each[r] = _values(weights), original.updated()
            if (number + 1) % updates.every == 0:
                with torch.no_grad():
                    for name, anchor in anchors.items():
                        if updates.averages:
                            values = [values[name] for values, _ in each]
                            anchor.copy_(sum_of(values) / lowered.data)
                        else:
                            differences = [anchor - values[name] for values, _ in each]
                            anchor.grad = sum_of(differences) / lowered.data
                if not updates.averages:
                    outer.step()
                each = [(_values(anchors), buffers) for _, buffers in each]
        original.set_masters(each[0][0])
        original.set_values(each[0][1])
        return Outcome(torch.stack(losses), first, original.state())

    def in_order(
        self, batches: Sequence[Mapping[str, torch.Tensor]], arrivals: Sequence[int]
    ) -> Outcome:
        """Steps of data ranks that do not wait for each other, in the recorded order: losses and
        first gradients of the first data rank, and the state after the last step.

        A data rank's gradient is for the weights that it got last: after its own update, or after
        the one that left it no more than `staleness` steps ahead of the slowest; -1 in `arrivals`
        gives all ranks the weights.
        """
        data, staleness = self._lowered.data, self._lowered.updates.staleness
        now = _values(self._weights)
        views = dict.fromkeys(range(data), now)
        clocks, waiting = [0] * data, set[int]()
        losses, first = [], Gradients()
        for r in arrivals:
            if r < 0:
                views = dict.fromkeys(views, now)
                continue
            loss, gradients = self.step_of(r, batches[clocks[r]], views[r])
            if r == 0:
                losses.append(loss)
                first = first or gradients
            self._original.set_masters(now)
            self.update()
            now = _values(self._weights)
            clocks[r] += 1
            waiting.add(r)
            for k in [k for k in waiting if clocks[k] - min(clocks) <= staleness]:
                waiting.remove(k)
                views[k] = now
        return Outcome(torch.stack(losses), first, self._original.state())

    def step_of(
        self, r: int, batch: Mapping[str, torch.Tensor], weights: Gradients
    ) -> tuple[torch.Tensor, Gradients]:
        """The mean loss of data rank `r` with these weights, and its gradients."""
        original, each = self._original, self._lowered.microbatches
        original.set_masters(weights)
        with original.accumulating():
            losses = original.backward(batch, range(r * each, (r + 1) * each), each)
        return torch.stack(losses).mean(), original.gradients()

    def gradients_of_ranks(
        self, batch: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[list[Gradients]]]:
        """The losses of all micro-batches, and each data rank's summand of the gradient of their
        mean: in one group, or in a group for each micro-batch where each is summed by itself."""
        original, each = self._original, self._lowered.microbatches
        losses, size = list[torch.Tensor](), 1 if self._lowered.zero > 1 else each
        groups: list[list[Gradients]] = [[] for _ in range(0, each, size)]
        for r in original.in_turn(self._lowered.data):
            for k, group in enumerate(groups):
                numbers = range(r * each + k * size, r * each + (k + 1) * size)
                losses += original.backward(batch, numbers, each * self._lowered.data)
                group.append(original.take_gradients())
        return losses, groups

    def packed(self, groups: Sequence[Sequence[Gradients]]) -> Gradients:
        """The compressed sums of the data ranks' summands, over all groups."""
        pairs = [self._packed(each) for each in groups]
        packed, whole = map(_total, zip(*pairs, strict=True))
        self.compression_error = max(self.compression_error, _distance(packed, whole))
        return packed

    def _packed(self, each: Sequence[Gradients]) -> tuple[Gradients, Gradients]:
        """The compressed gradients of a group, and the uncompressed ones."""
        dtype = DTYPES.get(self._lowered.updates.compression or "")
        names = dict.fromkeys(name for gradients in each for name in gradients)
        of_ranks = {name: self._of_ranks(name, each) for name in names}
        whole = {name: sum_of(gradients) for name, gradients in of_ranks.items()}
        packed = {
            name: whole[name]
            if name in self._tied or len(gradients) == 1
            else summed(gradients, dtype)
            if dtype is not None
            else self._factored(name, gradients)
            for name, gradients in of_ranks.items()
        }
        return packed, whole

    def _of_ranks(self, name: str, each: Sequence[Gradients]) -> list[torch.Tensor]:
        """The gradients that data ranks sum: for experts each summand comes from a group of expert
        ranks."""
        tensors = [gradients[name] for gradients in each if name in gradients]
        count = self._lowered.expert if self._lowered.graph.by_name[name].experts else 1
        return [sum_of(tensors[k : k + count]) for k in range(0, len(tensors), count)]

    def _factored(self, name: str, each: Sequence[torch.Tensor]) -> torch.Tensor:
        """PowerSGD's sum of the gradients of all data ranks, by the pieces that ranks hold
        (1905.13727, algorithm 1)."""
        pieces = zip(*(self._pieces(name, gradient) for gradient in each), strict=True)
        products = [self._product(name, k, parts) for k, parts in enumerate(pieces)]
        return self._joined(name, products, each[0].shape)

    def _product(self, name: str, k: int, each: Sequence[torch.Tensor]) -> torch.Tensor:
        """The product of the factors of one piece; `each` has the gradient of every data rank."""
        rank, shape, dtype = self._lowered.updates.rank, each[0].shape, each[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        if dtype.is_complex or not is_factored(shape, rank):
            return sum_of([gradient.to(wide) for gradient in each]).to(dtype)
        matrices = [gradient.to(wide).flatten(1) for gradient in each]
        if (name, k) in self._kept:
            errors, q = self._kept[name, k]
            matrices = [m + error for m, error in zip(matrices, errors, strict=True)]
        else:
            q = first_factor(name, matrices[0].shape[1], rank, matrices[0])
        p: torch.Tensor = torch.linalg.qr(sum_of([matrix @ q for matrix in matrices])).Q
        q = sum_of([matrix.T @ p for matrix in matrices])
        product: torch.Tensor = p @ q.T
        self._kept[name, k] = [matrix - product / len(each) for matrix in matrices], q
        return product.to(dtype).view(shape)

    def _pieces(self, name: str, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of a gradient on the ranks of one data coordinate, with padding."""
        lowered, ranks = self._lowered, self._lowered.size * self._lowered.tensor
        shard, size = lowered.graph.by_name[name].shard, self._rows.get(name)
        if size is not None:
            dim, width = gradient.shape.index(size), rows(size, ranks)
            padding = [*gradient.shape[:dim], width * ranks - size, *gradient.shape[dim + 1 :]]
            padded = torch.cat([gradient, gradient.new_zeros(padding)], dim)
            return [*padded.split(width, dim)]
        if shard is None or lowered.tensor == 1:
            return [gradient]
        return [shard.take(gradient, lowered.tensor, k) for k in range(lowered.tensor)]

    def _joined(self, name: str, pieces: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """Inverse of `_pieces`."""
        shard, size = self._lowered.graph.by_name[name].shard, self._rows.get(name)
        if size is not None:
            dim = shape.index(size)
            return torch.cat([*pieces], dim).narrow(dim, 0, size)
        whole: torch.Tensor = pieces[0] if len(pieces) == 1 or shard is None else shard.join(pieces)
        return whole

    def update(self) -> None:
        """A step of the optimizer."""
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._original.set_gradients({})


def _total(each: Sequence[Gradients]) -> Gradients:
    """The sums of gradients by name."""
    names = dict.fromkeys(name for gradients in each for name in gradients)
    return {name: sum_of([g[name] for g in each if name in g]) for name in names}


def _values(tensors: Mapping[str, torch.Tensor]) -> Gradients:
    """Copies of tensors."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def sum_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, in order."""
    return reduce(torch.add, tensors)


def _distance(packed: Gradients, whole: Gradients) -> float:
    """The norm of the difference over that of the whole gradients."""

    def norm(tensors: list[torch.Tensor]) -> float:
        squares = [torch.linalg.vector_norm(t).double().square() for t in tensors]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    difference = norm([packed[name] - whole[name] for name in whole])
    return difference / (norm([*whole.values()]) or 1.0)
