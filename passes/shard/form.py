"""An answer of the programme as a part of the plan, and what stays whole and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import fx

from parcompiler.passes.shard.assign import line
from parcompiler.passes.shard.candidates import Candidates, Site
from parcompiler.passes.shard.fold import Template
from parcompiler.passes.shard.programme import Answer
from parcompiler.passes.shard.telling import Told
from parcompiler.plan import Sharding, Shards
from parcompiler.spmd import Placement, Strategy
from parcompiler.spmd.rules import is_unknown, written_rule


def sharding(candidates: Candidates, told: Told, answer: Answer, stages: int) -> Sharding:
    """The plan's field: a line for each node of each template."""
    folded = candidates.folded
    chosen = {
        site.node: strategy
        for party, choice in zip(told.parties, answer.choices, strict=False)
        for site, strategy in zip(party.sites, party.choices[choice], strict=True)
    }
    number = len(told.parties)
    held = {
        item.name: types[answer.choices[number + k]]
        for k, (holder, types) in enumerate(told.held.items())
        for item in holder.items
    }
    several = Counter(template.name for template in folded.templates)
    return Sharding(
        level=folded.level,
        templates=tuple(
            _shards(candidates, template, chosen, held, named=several[template.name] > 1)
            for template in folded.templates
        ),
        solution=answer.solution,
        memory=round(answer.nbytes / stages) or None,
    )


def _shards(
    candidates: Candidates,
    template: Template,
    chosen: Mapping[fx.Node, Strategy],
    held: Mapping[str, Placement],
    *,
    named: bool,
) -> Shards:
    """The entry of one template."""
    sites = [candidates.sites[node] for node in template.first.nodes]
    return Shards(
        template=template.name,
        nodes=tuple(line(site.node, chosen[site.node], site.open) for site in sites),
        tensors=tuple(f"{b.attribute}: {held[b.name]}" for b in template.first.tensors),
        blocks=tuple(block.name for block in template.blocks) if named else (),
        whole=tuple(_whole(sites, candidates.prices.n)),
    )


def _whole(sites: list[Site], n: int) -> Iterator[str]:
    """The nodes with work that nothing splits, and why."""
    for site in sites:
        if site.call.operands and not site.work.is_free and all(map(_computes_whole, site.open)):
            yield f"{site.node.name}: {_reason(site, n)}"


def _computes_whole(strategy: Strategy) -> bool:
    """Whether every rank computes the whole, be it of summands."""
    return all(placement.kind != "S" for placement in (*strategy.inputs, *strategy.outputs))


def _reason(site: Site, n: int) -> str:
    """Why no strategy splits a node."""
    operator = str(site.node.target)
    if not site.call.is_plain:
        return f"{operator} has sizes that are not known before the step"
    if is_unknown(site.call):
        return f"no rule is known for {operator}"
    if written_rule(site.call) is None:
        return f"no rule is known for these arguments of {operator}"
    shapes = " and ".join("x".join(map(str, shape)) or "scalar" for shape in site.call.shapes)
    return f"{n} divides no dimension of {shapes} that {operator} can split"
