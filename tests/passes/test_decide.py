"""Plans on one mesh are weighed under other options, with what the ranks hold kept for all."""

import dataclasses

import torch

import parcompiler as pc
from parcompiler.models import gpt
from parcompiler.passes import DEFAULT, decide
from parcompiler.passes.shard.local import local


def test_each_trial_has_the_schedule_that_it_is_a_trial_of() -> None:
    config = gpt.Config(layers=4, heads=2, hidden=64, vocabulary=512, sequence=32)
    tokens = torch.zeros(1, config.sequence, dtype=torch.long)
    with torch.device("meta"):
        model = gpt.GPT(config)
    mesh = pc.Mesh(pipeline=2, tensor=2, device="h100")
    program = pc.compile(model, mesh, (tokens, tokens), microbatches=8, vocabulary="vocab-2")
    problem = program.problem
    for schedule in ("1f1b", "zb-h1", "gpipe"):
        asked = dataclasses.replace(problem.options, schedule=schedule)
        named = dataclasses.replace(problem, options=asked)
        assert local(named, program.plan).options.schedule == schedule
        assert decide.fastest(named, DEFAULT).schedule == schedule
