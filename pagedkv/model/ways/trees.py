"""Tree drafts: several guesses of how the text goes on, computed in one pass; the branch that comes true stays.

    text         .. x0 ┬ a  b  c          drafts 0 1 2: a branch
                       └ d ┬ e            drafts 3 4
                           └ f            draft 5 begins as draft 4 does, behind d
    slots        x0 │ a  b  c  d  e  f    one chunk of one sequence
    positions    p  │ +1 +2 +3 +1 +2 +2   the place of a draft in the text, by which it is rotated
    tree mask    f sees d and itself      and, as all drafts do, x0 and the tokens before it
    draw         t0 = d, t1 = f, t2       as ways/speculation.py does, along the tree
    move         d, f to the slots of a, b
    commit       .. x0 d  f │             the rest is rolled back

A draft sees the tokens that it would see in the text, each rotated to its place there. So its logits are those of the
plain way, and so are the tokens, for any seed. Only the order of its keys differs, and with it the last bits of a sum.

The KV of the branch lies in the slots of other drafts until `move` has copied it to the front: k and v of at most as
many tokens as came true, once for each layer; nothing if the first branch came true. The slots belong to the plan of
the step, which no other sequence reads, so an interrupt before the commit loses nothing.

A window counts places among the slots and not in the text, so a model with windows takes chains only: a request whose
drafter gives it several branches ends with an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from pagedkv.cache import PagedKVCache, PlannedBatch
    from pagedkv.kernels.args import PagedBatch
    from pagedkv.model.loop.draws import Guess
    from pagedkv.model.loop.sequence import Chunk, SequenceState


@dataclass(frozen=True)
class Tree:
    """Drafts of one sequence.

    parents: the index of each draft's predecessor in the text, which is smaller than its own; -1 if the predecessor
        is the sequence's last token
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def is_chain(self) -> bool:
        """Whether it has one branch at most, so that each draft follows the one before."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))


def merged(branches: Iterable[Sequence[int]], most: int) -> Tree:
    """Return the tree of several continuations. Equal beginnings are one branch. most: drafts; the first ones stay"""
    tokens, parents = list[int](), list[int]()
    known: dict[tuple[int, int], int] = {}
    for branch in branches:
        at = -1
        for token in branch:
            if (at, token) not in known:
                if len(tokens) == most:
                    break
                known[at, token] = len(tokens)
                tokens.append(token)
                parents.append(at)
            at = known[at, token]
    return Tree(tuple(tokens), tuple(parents))


class Branches(NamedTuple):
    """The batch of a step with trees, as the decoder needs it.

    batch: with the positions of drafts in the text
    Shapes: mask bool [T, max_seqlen_q], the tree_mask of attention
    """

    batch: PagedBatch
    mask: Tensor


def branches_of(chunks: Sequence[Chunk], batch: PlannedBatch) -> Branches | None:
    """Return positions and mask of a step; None if no chunk has a tree."""
    if not any(chunk.parents for chunk in chunks):
        return None
    positions = batch.plan.positions.copy()
    sees = np.zeros((len(positions), batch.max_seqlen_q), np.bool_)
    end = 0
    for chunk in chunks:
        begin, end = end, end + chunk.num_tokens
        sees[begin:end, : chunk.num_tokens] = np.tri(chunk.num_tokens, dtype=np.bool_)
        if chunk.parents:
            own = chunk.num_tokens - len(chunk.drafts)
            _grow(chunk.parents, sees[begin + own : end, own:], positions[begin + own - 1 : end])
    device = batch.seq_lens.device
    placed = replace(batch[0], positions=torch.from_numpy(positions).to(device))
    return Branches(placed, torch.from_numpy(sees).to(device))


def _grow(parents: tuple[int, ...], sees: npt.NDArray[np.bool_], positions: npt.NDArray[np.int64]) -> None:
    """Let each draft see the drafts before it in the text, and itself, and give it its place there.

    Shapes: sees [drafts, >= drafts]; positions [1 + drafts], that of the last token first
    Modifies: sees, positions
    """
    sees[:, : len(parents)] = False
    for draft, parent in enumerate(parents):
        if parent >= 0:
            sees[draft] = sees[parent]
        sees[draft, draft] = True
        positions[1 + draft] = positions[1 + parent] + 1


def move(
    cache: PagedKVCache,
    batch: PlannedBatch,
    chunks: Sequence[Chunk],
    accepted: Mapping[SequenceState, Sequence[Guess]],
) -> None:
    """Copy the KV of the drafts that came true to the first slots of the drafts. Call it before the commit.

    Modifies: the pool behind `cache`, at slots of the batch
    """
    sources, targets = list[int](), list[int]()
    end = 0
    for chunk in chunks:
        end += chunk.num_tokens
        first = end - len(chunk.drafts)
        for place, guess in enumerate(accepted.get(chunk.sequence, ())):
            if guess.draft != place:
                sources.append(first + guess.draft)
                targets.append(first + place)
    if sources:
        slots, size = batch.plan.slots, cache.spec.block_size
        from_, to = (torch.from_numpy(slots[which]).to(batch.seq_lens.device) for which in (sources, targets))
        for layer in map(cache.__getitem__, range(len(cache))):
            for tensor in (layer.k, layer.v, layer.k_scale, layer.v_scale):
                if tensor is not None and tensor.dim() > 1:  # a scale may be one number for all
                    tensor[to // size, to % size] = tensor[from_ // size, from_ % size]
