"""Batches of random numbers for the ranks of tests."""

import torch

from parcompiler.runtime import RankProgram


def drawn_batch(program: RankProgram, generator: torch.Generator) -> object:
    """A batch of normal floats and of integers below the bounds that the model sets."""
    batch = {}
    for spec in program.inputs.values():
        shape = (spec.shape[0] * program.microbatches, *spec.shape[1:]) if spec.shape else ()
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            batch[spec.key] = torch.randn(shape, generator=generator, dtype=spec.dtype)
        else:
            high = 2 if spec.high is None else spec.high
            drawn = torch.randint(0, high, shape, generator=generator)
            batch[spec.key] = drawn.to(spec.dtype)
    return program.in_form(batch)
