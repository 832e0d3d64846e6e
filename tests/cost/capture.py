"""A module as one block, and what it really saves: the two sides of the comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from parcompiler.cost import BlockCost, Operation, trace_block
from parcompiler.graph import NodeRoles


@dataclass(frozen=True)
class Captured:
    """The exported graph of a module, with the names that the cost model asks for."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    roles: NodeRoles

    def cost(
        self,
        nodes: Sequence[fx.Node] | None = None,
        inputs: Sequence[fx.Node] | None = None,
        outputs: Sequence[fx.Node] | None = None,
        *,
        split: bool = False,
        overwritten: Mapping[fx.Node, Sequence[fx.Node]] | None = None,
        accelerator: bool = False,
    ) -> BlockCost:
        """The cost of the whole graph as one block, or of some of its nodes."""
        return trace_block(
            nodes=self.nodes if nodes is None else nodes,
            inputs=self.inputs if inputs is None else inputs,
            outputs=self.outputs if outputs is None else outputs,
            roles=self.roles,
            split=split,
            overwritten=overwritten,
            accelerator=accelerator,
        )


def capture(
    module: nn.Module,
    *args: torch.Tensor,
    dynamic_shapes: tuple[Mapping[int, object], ...] | None = None,
) -> Captured:
    """Export `module`; the `args` that require gradients carry them."""
    plain = tuple(value.detach() for value in args)
    program = torch.export.export(module, plain, dynamic_shapes=dynamic_shapes, strict=False)
    signature, graph = program.graph_signature, program.graph
    body = tuple(node for node in graph.nodes if node.op == "call_function")
    inputs = tuple(node for node in graph.nodes if node.name in signature.user_inputs)
    frozen = {name for name, value in module.named_parameters() if not value.requires_grad}
    owned = signature.inputs_to_parameters
    parameters = frozenset(node for node, name in owned.items() if name not in frozen)
    placeholders = {node.name for node in graph.nodes if node.op == "placeholder"}
    carrying = {node.name for node, value in zip(inputs, args, strict=True) if value.requires_grad}
    return Captured(
        nodes=body,
        inputs=inputs,
        outputs=tuple(node for node in graph.output_node().all_input_nodes if node in body),
        roles=NodeRoles(
            parameters,
            frozenset(placeholders - parameters - {node.name for node in inputs}),
            frozenset(carrying | {node.name for node in body}),
        ),
    )


def cost_of(module: nn.Module, *args: torch.Tensor) -> BlockCost:
    """The cost of `module` as one block."""
    return capture(module, *args).cost()


def products(operations: Sequence[Operation], kind: str = "") -> float:
    """The FLOPs of matrix products, attention and convolutions, or of one of these kinds."""
    kinds = {kind} if kind else {"matmul", "attention", "convolution"}
    return sum(operation.flops for operation in operations if operation.kind in kinds)


def really_saved(module: nn.Module, *args: torch.Tensor) -> tuple[int, int]:
    """Bytes that a run saves for its backward, each storage once: (its own, its inputs)."""
    tensors: dict[torch.UntypedStorage, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tensors[tensor.untyped_storage()] = kept = tensor.detach()
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*args)
    state = {value.untyped_storage() for value in (*module.parameters(), *module.buffers())}
    given = {value.untyped_storage() for value in args}
    own = sum(storage.nbytes() for storage in tensors.keys() - state - given)
    return own, sum(storage.nbytes() for storage in tensors.keys() & given)
