"""What an early release wrote is read today: an export of the first format, and its plan.

tests/golden/old_export was written before 0.1.0, and is never written again.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

import parcompiler as pc
from parcompiler.models import gpt
from parcompiler.verification.pool import Job, pool

OLD = Path(__file__).parents[1] / "golden" / "old_export"


def test_ranks_of_an_old_export_train_the_model_that_it_holds() -> None:
    config = gpt.Config(layers=2, heads=2, hidden=8, vocabulary=16, sequence=4)
    model = gpt.GPT(config).double()
    weights = {k: v for file in (OLD / "weights").glob("*.safetensors")
               for k, v in load_file(file).items()}  # fmt: skip
    model.load_state_dict(weights, strict=False)
    generator = torch.Generator().manual_seed(1)
    batch = {name: torch.randint(16, (2, 4), generator=generator) for name in ("0", "1")}
    outcome = pool().run(Job(str(OLD), [batch]), 2)
    pieces = zip(batch["0"].split(1), batch["1"].split(1), strict=True)
    loss = torch.stack([model(*piece) for piece in pieces]).mean()
    loss.backward()
    assert abs(outcome.loss - loss) <= 1e-9 * abs(loss)
    for name, parameter in model.named_parameters():
        if name in outcome.gradients:
            assert torch.allclose(outcome.gradients[name], parameter.grad, rtol=1e-9, atol=1e-15)  # type: ignore[arg-type]
    assert outcome.gradients.keys() == {name for name, _ in model.named_parameters()}


def test_its_plan_and_its_report_are_read_and_compiled_from() -> None:
    plan = pc.Plan.from_json((OLD / "plan.json").read_text(encoding="utf-8"))
    assert (plan.schedule, plan.microbatches, len(plan.stages or ())) == ("1f1b", 2, 2)
    assert pc.load(OLD).report().plan.schedule == "1f1b"
    model = gpt.GPT(gpt.Config(layers=2, heads=2, hidden=8, vocabulary=16, sequence=4))
    tokens = torch.zeros(1, 4, dtype=torch.long)
    program = pc.compile(
        model, pc.Mesh(pipeline=2), (tokens, tokens), precision="fp64", plan=plan, progress=False
    )
    assert program.plan.stages == plan.stages
