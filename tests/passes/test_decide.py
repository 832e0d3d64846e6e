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


def test_the_row_of_the_vocabulary_that_was_taken_is_about_the_plan() -> None:
    config = gpt.Config(layers=8, heads=8, hidden=512, vocabulary=8192, sequence=128)
    tokens = torch.zeros(4, config.sequence, dtype=torch.long)
    with torch.device("meta"):
        model = gpt.GPT(config)
    mesh = pc.Mesh(pipeline=2, device="h100")
    program = pc.compile(model, mesh, (tokens, tokens), microbatches=8)
    plan, simulated = program.plan, program.simulate()
    assert plan.runner_up is not None  # a plainer plan was taken
    assert plan.runner_up.schedule != plan.schedule
    assert plan.vocabulary is not None
    (row,) = (x for x in plan.vocabulary.weighed or () if x.method == plan.vocabulary.method)
    assert row.schedule == plan.schedule
    assert (row.seconds, row.memory) == (simulated.step_time, max(simulated.peak_memory))
