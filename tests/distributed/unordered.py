"""Starts compiled ranks, then such of which one does its exchanges in another order; prints what
each raises."""

import os

import torch

import parcompiler as pc
from parcompiler.runtime import tensor
from tests.runtime.test_compiled import not_compiled


def main(folder: str) -> None:
    from torch._inductor import compile_fx  # warns

    compile_fx.compile_fx_inner = not_compiled  # type: ignore[assignment]  # a function is enough
    start(folder)
    if os.environ["RANK"] == "1":  # its zeros depend on no gradient: AOTAutograd moves them
        tensor._on_first = lambda axis: torch.zeros_like
    start(folder)


def start(folder: str) -> None:
    try:
        with pc.load(folder).worker(compiled=True):
            print("started")
    except pc.LaunchError as error:
        print(error)
