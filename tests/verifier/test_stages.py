"""Mistakes in stages, values and tensors, each written by hand and found with its message."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from parcompiler.capture import capture
from parcompiler.capture.blocks import cut
from parcompiler.lower import Call, Lowered, TiedTensor, lower
from tests.verifier.edits import texts, with_stage, with_value
from tests.verifier.programs import placed, plan, program, skipping


@pytest.fixture
def chain() -> Lowered:
    """Stage j has layers.j, for j up to 3."""
    return program("chain", 4, "naive", 2)


@pytest.fixture
def skips() -> Lowered:
    """As chain; stages 1 and 2 read the result of stage 0, and a mask in their prologue."""
    return program("skips", 4, "naive", 2)


@pytest.fixture
def ties() -> Lowered:
    """Ranks 0 and 3 share two tensors, ranks 1 and 3 one, and ranks 1, 2 and 3 another."""
    return program("ties", 4, "naive", 2)


def rules(lowered: Lowered) -> set[str]:
    """The names of the broken rules."""
    return {text.partition(":")[0] for text in texts(lowered)}


def test_a_block_that_is_moved_backwards_is_found() -> None:
    found = texts(placed("chain", [["layers.0", "layers.2"], ["layers.1", "layers.3"]]))
    assert "data flows forward: layers.1 (stage 1) feeds layers.2 (stage 0)" in found
    assert any("FORWARD stage 0" in text or "wait for each other" in text for text in found)


def test_stages_in_the_wrong_order_are_found() -> None:
    found = texts(placed("chain", [["layers.2", "layers.3"], ["layers.0", "layers.1"]]))
    assert found[0] == "data flows forward: layers.1 (stage 1) feeds layers.2 (stage 0)"


def test_blocks_of_a_stage_stand_in_the_order_of_the_model() -> None:
    found = texts(placed("chain", [["layers.1", "layers.0"], ["layers.2", "layers.3"]]))
    assert found == [
        "a block finds what it reads: layers.1 (stage 0) reads layers_0, which a later block of "
        "the stage makes (order them as the model does)"
    ]


def test_a_block_on_two_stages_is_found(chain: Lowered) -> None:
    (again,) = chain.stages[1].calls
    mutant = with_stage(chain, 2, calls=(again, *chain.stages[2].calls))
    found = texts(mutant)
    assert found[0].startswith(
        "every node runs once: layers.1 (stage 1) and layers.1 (stage 2) run linear_1 and 1 more "
        "(module 'layers.1'"
    )
    assert found[0].endswith("(each block goes on one stage)")
    assert "every tensor is on a stage that reads it" in rules(mutant)


def test_a_block_on_no_stage_is_found(chain: Lowered) -> None:
    found = texts(with_stage(chain, 2, calls=()))
    assert found[0] == "no stage is empty: stage 2 has no block"
    assert found[1].startswith(
        "every node runs once: no stage runs linear_2 and 1 more (module 'layers.2', File "
    )


def test_a_stage_needs_a_rank_and_its_number(chain: Lowered) -> None:
    assert texts(with_stage(chain, 3, rank=7))[0] == (
        "every stage is on a rank: stage 3 is on rank 7 (ranks: 0 to 3)"
    )
    assert texts(with_stage(chain, 3, index=2)) == [
        "every stage is on a rank: stage 3 calls itself stage 2"
    ]


def test_every_rank_has_both_lists(chain: Lowered) -> None:
    assert texts(replace(chain, evaluation=chain.evaluation[:3]))[0] == (
        "every stage is on a rank: 4 ranks have a list for training and 3 for evaluation"
    )


def test_a_name_stands_for_one_node(chain: Lowered) -> None:
    node = next(node for node, name in chain.variables.items() if name == "layers_2")
    mutant = replace(chain, variables={**chain.variables, node: "layers_0"})
    assert "every name stands for one node: layers_0 stands for tanh and tanh_2" in texts(mutant)


def test_a_call_reads_what_its_block_reads(chain: Lowered) -> None:
    (call,) = chain.stages[2].calls
    assert texts(with_stage(chain, 2, calls=(replace(call, arguments=("layers_0",)),)))[0] == (
        "a block finds what it reads: layers.2 (stage 2) reads layers_0 in the place of layers_1"
    )
    assert texts(with_stage(chain, 2, calls=(replace(call, arguments=()),)))[0] == (
        "a block finds what it reads: layers.2 (stage 2) reads 0 values, its block 1"
    )
    assert texts(with_stage(chain, 2, calls=(replace(call, results=("layers_1",)),)))[0] == (
        "a block finds what it reads: layers.2 (stage 2) returns layers_1 in the place of layers_2"
    )


def test_a_block_declares_what_its_nodes_read(chain: Lowered) -> None:
    (call,) = chain.stages[2].calls
    block = replace(call.block, inputs=(), nodes=call.block.nodes[::-1])
    assert texts(with_stage(chain, 2, calls=(replace(call, block=block, arguments=()),)))[:2] == [
        "a block finds what it reads: layers.2: tanh_2 reads linear_2, which is no input",
        "a block finds what it reads: layers.2: linear_2 reads tanh_1, which is no input",
    ]
    (other,) = call.block.inputs
    block = replace(call.block, outputs=(other,))
    assert texts(with_stage(chain, 2, calls=(replace(call, block=block),)))[0] == (
        "a block finds what it reads: layers.2 returns tanh_1, which it does not compute"
    )


def test_what_a_stage_needs_of_the_batch_is_taken(chain: Lowered) -> None:
    assert texts(with_stage(chain, 0, inputs=())) == [
        "a block finds what it reads: layers.0 (stage 0) reads x, which the stage does not take "
        "from the batch"
    ]
    assert texts(with_stage(chain, 0, inputs=("x", "y"))) == [
        "a block finds what it reads: stage 0 takes y from the batch, which has no such tensor"
    ]
    assert texts(with_stage(chain, 0, inputs=("x", "x"))) == [
        "a block finds what it reads: stage 0 takes x 2 times"
    ]


def test_what_a_stage_needs_of_others_is_received(skips: Lowered) -> None:
    first, _ = skipping(skips)
    fewer = tuple(name for name in skips.stages[2].receives if name != first)
    found = texts(with_stage(skips, 2, receives=fewer))
    assert found[0] == (
        f"a block finds what it reads: layers.2 (stage 2) reads {first}, which stage 0 "
        "makes and stage 2 does not receive"
    )
    assert (
        f"both ends agree on a value: {first} goes from stage 0 to stage 1 "
        "(listed from stage 0 to stages 1, 2)"
    ) in found
    assert (
        f"no message is in vain: rank 0 sends {first} mb 0, 1 to rank 2: no stage of rank 2 "
        f"receives {first}"
    ) in found


def test_what_a_stage_receives_is_made_elsewhere_and_used(chain: Lowered) -> None:
    start = "what one stage gives another receives: stage 2 receives "
    assert start + "nothing, which no stage makes" in texts(
        with_stage(chain, 2, receives=("layers_1", "nothing"))
    )
    assert start + "layers_2, which it makes itself" in texts(
        with_stage(chain, 2, receives=("layers_1", "layers_2"))
    )
    assert start + "layers_0, which none of its blocks reads" in texts(
        with_stage(chain, 2, receives=("layers_1", "layers_0"))
    )


def test_a_stage_gives_what_others_receive(chain: Lowered) -> None:
    assert texts(with_stage(chain, 1, gives=())) == [
        "what one stage gives another receives: stage 2 receives layers_1, which stage 1 does "
        "not give"
    ]
    assert texts(with_stage(chain, 1, gives=("layers_1", "layers_0"))) == [
        "what one stage gives another receives: stage 1 gives layers_0, which it does not make"
    ]
    assert texts(with_stage(chain, 3, gives=("loss",))) == [
        "what one stage gives another receives: stage 3 gives loss, which no other stage receives"
    ]


def test_the_prologue_is_complete_and_in_order(skips: Lowered) -> None:
    greater, mask = skips.stages[1].prologue
    name = skips.variables[mask]
    assert texts(with_stage(skips, 1, prologue=(greater,))) == [
        f"a block finds what it reads: layers.1 (stage 1) reads {name}, which no block makes and "
        "the stage does not compute"
    ]
    start = "the prologue needs no gradient and no chance: stage 1: "
    assert texts(with_stage(skips, 1, prologue=(mask, greater))) == [
        f"{start}{mask.name} reads {greater.name}, which is not there"
    ]


def test_the_prologue_needs_no_gradient_parameter_or_chance(skips: Lowered) -> None:
    prologue = skips.stages[0].prologue
    (call,) = skips.stages[0].calls
    linear = call.block.nodes[0]
    found = texts(with_stage(skips, 0, prologue=(*prologue, linear)))
    start = f"the prologue needs no gradient and no chance: stage 0: {linear.name} "
    assert start + "carries a gradient, which would stay here (give it to one stage)" in found
    assert start + "reads layers.0.weight, which changes while training" in found


def test_random_nodes_are_on_one_stage() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x + torch.rand_like(x))
            return x.sum()

    graph = capture(Noise(), (torch.zeros(2, 4),))
    parts = cut(graph, 1)
    names = [[block.name] for block in parts.blocks]
    lowered = lower(graph, plan("", names, "naive", 1), parts)
    assert texts(lowered) == []
    noise = lowered.stages[0].calls[0].block.nodes[0]
    found = texts(with_stage(lowered, 0, prologue=(noise,)))
    assert f"stage 0: {noise.name} draws random numbers, on each stage others" in found[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"shape": (2, 8)},
            "layers_1 is torch.float32 (2, 4) on stage 1, and buffers are torch.float32 (2, 8)",
        ),
        (
            {"dtype": torch.bfloat16},
            "layers_1 is torch.float32 (2, 4) on stage 1, and buffers are torch.bfloat16 (2, 4)",
        ),
        ({"differentiable": False}, "layers_1 carries a gradient (none is listed)"),
        ({"detached": (2,)}, "layers_1 is detached on no stage (stage 2 is listed)"),
        (
            {"producer": 0},
            "layers_1 goes from stage 1 to stage 2 (listed from stage 0 to stage 2)",
        ),
        (
            {"consumers": (2, 3)},
            "layers_1 goes from stage 1 to stage 2 (listed from stage 1 to stages 2, 3)",
        ),
        ({"name": "other"}, "layers_1 is listed under the name other"),
    ],
)
def test_the_table_of_values_is_right(
    chain: Lowered, changes: dict[str, object], message: str
) -> None:
    found = texts(with_value(chain, "layers_1", **changes))
    assert found == [f"both ends agree on a value: {message}"]


def test_the_table_of_values_is_complete(chain: Lowered) -> None:
    fewer = {name: value for name, value in chain.values.items() if name != "layers_1"}
    assert texts(replace(chain, values=fewer)) == [
        "both ends agree on a value: layers_1 goes to stage 2, but has no shape and dtype"
    ]
    more = {**chain.values, "layers_3": chain.values["layers_2"]}
    assert texts(replace(chain, values=more)) == [
        "both ends agree on a value: layers_3 is listed, but no stage receives it from another"
    ]


def test_only_tensors_go_between_stages(chain: Lowered) -> None:
    node = next(node for node, name in chain.variables.items() if name == "layers_1")
    value = node.meta["val"]
    try:
        node.meta["val"] = (value, value)
        assert texts(chain) == [
            "both ends agree on a value: layers_1 is no tensor, and only tensors go between stages"
        ]
    finally:
        node.meta["val"] = value


def test_one_stage_has_the_loss(chain: Lowered) -> None:
    assert texts(with_stage(chain, 3, loss=None))[0] == "one stage has the loss: it is on no stage"
    assert texts(with_stage(chain, 0, loss="loss"))[:2] == [
        "one stage has the loss: it is on stages 0, 3",
        "one stage has the loss: stage 0 has it, but none of its blocks makes loss",
    ]
    assert texts(with_stage(chain, 3, loss="layers_2")) == [
        "one stage has the loss: stage 3 calls layers_2 the loss, the graph loss"
    ]


def test_a_parameter_of_two_ranks_is_summed(ties: Lowered) -> None:
    rest = ties.tied[1:]
    lists = [[x for x in lines if x.value != "tied_0"] for lines in ties.instructions]
    assert texts(replace(ties, tied=rest, instructions=tuple(map(tuple, lists)))) == [
        "every parameter has one gradient: layers.0.weight is on ranks 0, 3, and nothing sums its "
        "gradients"
    ]


def test_a_parameter_is_summed_over_the_ranks_that_hold_it(ties: Lowered) -> None:
    mutant = replace(ties, tied=(replace(ties.tied[0], ranks=(0, 1, 3)), *ties.tied[1:]))
    found = texts(mutant)
    assert found[0] == (
        "every parameter has one gradient: layers.0.weight is on ranks 0, 3, and tied_0 sums over "
        "ranks 0, 1, 3"
    )
    assert (
        "every copy of a parameter is reduced: rank 1 never sums tied_0 (layers.0.weight)" in found
    )


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            TiedTensor("tied_3", "layers.2.weight", (1,)),
            "layers.2.weight is on rank 1, and tied_3 sums",
        ),
        (
            TiedTensor("tied_3", "nothing", (1, 2)),
            "tied_3 sums gradients of nothing, which the model",
        ),
        (
            TiedTensor("tied_3", "layers.0.weight", (0, 3)),
            "layers.0.weight is summed 2 times (tied_0, ",
        ),
        (TiedTensor("tied_0", "layers.1.weight", (1, 3)), "2 parameters have the label tied_0"),
    ],
)
def test_a_sum_belongs_to_one_parameter(ties: Lowered, item: TiedTensor, message: str) -> None:
    found = texts(replace(ties, tied=(*ties.tied, item)))
    assert any(text.startswith(f"every parameter has one gradient: {message}") for text in found)


def test_a_stage_holds_what_it_reads(chain: Lowered) -> None:
    tensors = chain.stages[1].tensors
    assert texts(with_stage(chain, 1, tensors=tensors[1:])) == [
        "every tensor is on a stage that reads it: "
        f"stage 1 reads {tensors[0]} and does not hold it",
        f"every tensor is on a stage that reads it: no stage holds {tensors[0]}",
    ]
    assert texts(with_stage(chain, 1, tensors=(*tensors, "nothing"))) == [
        "every tensor is on a stage that reads it: stage 1 holds nothing, which the model does "
        "not have"
    ]


def test_a_parameter_on_a_second_rank_needs_a_sum(chain: Lowered) -> None:
    tensors = (*chain.stages[1].tensors, "layers.0.weight")
    assert texts(with_stage(chain, 1, tensors=tensors)) == [
        "every parameter has one gradient: layers.0.weight is on ranks 0, 1, and nothing sums its "
        "gradients"
    ]


def test_running_statistics_are_on_one_stage() -> None:
    lowered = program("norms", 4, "naive", 2)
    tensors = (*lowered.stages[1].tensors, "layers.0.1.running_mean")
    assert texts(with_stage(lowered, 1, tensors=tensors)) == [
        "what is updated in place stays on one stage: layers.0.1.running_mean is on stages 0, 1, "
        "and each would update its own"
    ]


def test_running_statistics_are_updated_once() -> None:
    lowered = program("norms", 4, "naive", 2)
    (call,) = lowered.stages[1].calls
    found = texts(with_stage(lowered, 1, calls=(replace(call, recompute=True),)))
    rule = "what is recomputed updates nothing: layers.1 (stage 1) updates layers.1.1."
    assert [text.removeprefix(rule).partition(" ")[0] for text in found] == [
        "num_batches_tracked", "running_mean", "running_var"
    ]  # fmt: skip


class Shared(nn.Module):
    """One norm after every layer: all of them update its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return x.sum()


def test_layers_that_update_the_same_statistics_are_one_block() -> None:
    graph = capture(Shared(), (torch.zeros(2, 4),))
    parts = cut(graph, 1)
    updates = [block for block in parts.blocks if any("batch_norm" in n.name for n in block.nodes)]
    assert len(updates) == 1
    names = [block.name for block in parts.blocks]
    for division in ([names], [names[:1], names[1:]]):
        assert texts(lower(graph, plan("", division, "naive", 2), parts)) == []


class Early(nn.Module):
    """A part of a value is updated in place after another layer has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.layers[0](x)
        second = self.layers[1](first.exp())
        first[:, :2].mul_(2)
        third: Tensor = self.layers[2](second)
        return (third + first).sum()


@pytest.fixture
def early() -> tuple[Lowered, Call, Call]:
    """The program on one stage, whose first block is cut in two: the update is in the second."""
    graph = capture(Early(), (torch.zeros(2, 4),))
    parts = cut(graph, 1)
    names = [[block.name for block in parts.blocks]]
    lowered = lower(graph, plan("", names, "naive", 1), parts)
    assert texts(lowered) == []
    (call, *_) = lowered.stages[0].calls
    nodes = call.block.nodes
    at = [node.name for node in nodes].index("mul_")
    first, second = (replace(call.block, nodes=some) for some in (nodes[:at], nodes[at:]))
    return lowered, replace(call, block=first), replace(call, block=second)


def test_an_update_in_place_is_on_the_stage_of_its_memory(
    early: tuple[Lowered, Call, Call],
) -> None:
    lowered, first, second = early
    (stage,) = lowered.stages
    spread = (
        replace(stage, calls=(first,)),
        replace(stage, index=1, calls=(second, *stage.calls[1:])),
    )
    assert (
        "what is updated in place stays on one stage: linear is updated and shared by stage 0 and "
        "stage 1"
    ) in texts(replace(lowered, stages=spread))


def test_what_reads_memory_before_its_update_is_on_its_stage(
    early: tuple[Lowered, Call, Call],
) -> None:
    lowered, first, second = early
    (stage,) = lowered.stages
    (exp,) = (node for node in first.block.nodes if node.name == "exp")
    nodes = tuple(node for node in (*first.block.nodes, *second.block.nodes) if node is not exp)
    kept = replace(first, block=replace(first.block, nodes=nodes))
    alone = replace(first, block=replace(first.block, nodes=(exp,)))
    spread = (
        replace(stage, calls=(kept, *stage.calls[1:])),
        replace(stage, index=1, calls=(alone,)),
    )
    assert (
        "what is updated in place stays on one stage: stage 0 updates linear, and stage 1 reads it "
        "(exp)"
    ) in texts(replace(lowered, stages=spread))


def test_updates_in_place_keep_their_order(early: tuple[Lowered, Call, Call]) -> None:
    lowered, first, second = early
    turned = (second, first, *lowered.stages[0].calls[1:])
    assert (
        "updates in place keep their order: stage 0 runs linear too late (it touches linear)"
        in (texts(with_stage(lowered, 0, calls=turned)))
    )
