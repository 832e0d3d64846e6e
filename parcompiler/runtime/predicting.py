"""Outputs of the model, from the ranks that make them to the first rank of each data coordinate.

    evaluation ─► value of a stage ─► whole over tensor ranks ─► rank (0, data, 0)
                                                └─► x of a head in rows: to every rank, its rows'
                                                    logits ─► joined there

Stages keep outputs in evaluations only, and no instruction moves them: training steps are
unaffected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from parcompiler.errors import InputError
from parcompiler.pieces import Shard, own_rows
from parcompiler.runtime import head
from parcompiler.runtime.axis import in_memory, wire
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.program import KeptOutput, RankProgram, Value
from parcompiler.runtime.vocabulary import Vocabulary, VocabularyRows

Kept = Mapping[str, Mapping[int, torch.Tensor]]  # by value and micro-batch


class Predictions:
    """Gathers the outputs of evaluations."""

    def __init__(
        self, program: RankProgram, channels: Channels, vocabulary: Vocabulary | None
    ) -> None:
        self._program, self._channels = program, channels
        self._rows = VocabularyRows(program)
        self._head = None
        if vocabulary is not None and vocabulary.head is not None:
            self._head = head.rows_of_head(vocabulary)

    def by_rows(self, output: KeptOutput) -> bool:
        """Whether an output has rows for each sample."""
        return bool(output.shape) and output.shape[0] % self._program.samples == 0

    def check(self, samples: int) -> None:
        """Raise InputError where outputs of `samples` cannot be separated from those of padding."""
        needed = self._program.samples
        for name, output in self._program.outputs.items():
            if samples % needed and not self.by_rows(output):
                message = (
                    f"the output {name!r} has no rows for each sample (shape {output.shape}): give "
                    f"a multiple of {needed} samples ({samples} given)"
                )
                raise InputError(message)

    def gather(self, kept: Kept, count: int) -> dict[str, torch.Tensor]:
        """The outputs of `count` micro-batches, [count, *shape] on the CPU, on the first rank of
        each data coordinate; nothing elsewhere. A collective."""
        outputs = {}
        for name, output in self._program.outputs.items():
            whole = self._moved(output, kept.get(output.value, {}), count)
            if whole is not None:
                outputs[name] = whole.to("cpu", output.dtype)
        return outputs

    def joined(
        self, parts: Sequence[Mapping[str, torch.Tensor]], samples: int
    ) -> dict[str, torch.Tensor]:
        """The outputs of a batch of samples, joined from those of its micro-batches."""
        result = {}
        for name, output in self._program.outputs.items():
            whole = torch.cat([part[name] for part in parts])
            if self.by_rows(output):
                rows = output.shape[0] // self._program.samples
                whole = whole.flatten(0, 1)[: samples * rows]
            result[name] = whole
        return result

    def _moved(
        self, output: KeptOutput, made: Mapping[int, torch.Tensor], count: int
    ) -> torch.Tensor | None:
        """One output on the first rank of its data coordinate."""
        program = self._program
        at, grid = program.coordinate, program.grid
        home, source = grid.rank(0, at.data, 0), grid.rank(output.home, at.data, 0)
        shape = (count, *output.shape)
        whole = None
        if at.pipeline == output.home:
            whole = torch.stack([self._whole(output, made[i]) for i in range(count)])
        if output.head:
            assert self._head is not None
            value = Value(shape, self._head.weight.dtype)
            pending = self._channels.broadcast_value(whole, value, source)
            return self._logits(output, pending.wait(), home)
        if home != source and program.rank == source:
            assert whole is not None
            self._channels.send_now(wire(in_memory(whole)), home)
        elif home != source and program.rank == home:
            whole = torch.empty(shape, dtype=output.dtype, device=self._channels.device)
            self._channels.receive_now(wire(whole), source)
        return whole if program.rank == home else None

    def _whole(self, output: KeptOutput, part: torch.Tensor) -> torch.Tensor:
        """An output of a micro-batch from this tensor rank's part of it."""
        axis = self._channels.axes.get("tensor")
        if axis is None or (output.dim is None and not output.partial):
            return part
        if output.partial:
            return axis.all_reduce(part)
        assert output.dim is not None
        return axis.all_gather(part, Shard(output.dim, output.sizes))

    def _logits(self, output: KeptOutput, x: torch.Tensor, home: int) -> torch.Tensor | None:
        """The logits of all rows, joined at `home`; x [..., h] is there on all ranks."""
        rows, channels = self._head, self._channels
        assert rows is not None
        logits = F.linear(x, rows.weight, None if rows.bias is None else rows.bias.flatten())
        if output.head == "logits" and rows.softmax.function is not None:
            logits = rows.softmax.function(logits)
        if self._program.rank != home:
            channels.send_now(in_memory(logits), home)
            return None
        parts = []
        for index, rank in enumerate(self._rows.ranks):
            part = logits
            if rank != home:
                part = channels.receive_now(torch.empty_like(logits), rank)
            parts.append(part[..., : own_rows(rows.classes, len(self._rows.ranks), index).size])
        return torch.cat(parts, -1)
