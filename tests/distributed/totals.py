"""Runs a step of an exported program and prints how often each shape was added up over ranks."""

import json
from collections import Counter
from typing import Any

import torch

import parcompiler as pc
from parcompiler.runtime.axis import Axis
from tests import zoo


def main(folder: str) -> None:
    ids = torch.randint(0, zoo.VOCABULARY, (6, zoo.LENGTH), generator=torch.Generator())
    counts = Counter[str]()
    total: Any = Axis.all_reduce

    def counted(axis: Axis, summand: torch.Tensor) -> torch.Tensor:
        counts[str(list(summand.shape))] += 1
        found: torch.Tensor = total(axis, summand)
        return found

    with pc.load(folder).worker() as worker:
        Axis.all_reduce = counted  # type: ignore[method-assign,assignment]
        worker.step({"tokens": ids, "labels": ids})
        if worker.rank == 0:
            print(json.dumps(counts), flush=True)
