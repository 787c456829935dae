"""Many candidates judged at once, exactly as if each were asked question by question.

A judge's verdicts depend on each other: a later one is made in the light of the earlier ones. Asked
naively that is one pass over the conversation for every verdict of every candidate. Here it is

1. one pass over what the candidates share (the history, its pictures, the instructions), whose cache
   is then repeated for each candidate;
2. passes over the steps, up to the next verdict of each candidate. What lies beyond it can be read in
   the same pass on a *draft* of that verdict, at first its question's first label (True). That is
   done where it costs less than another pass, and for nothing in rows that would be padding: they
   are read ahead as far as the longest row goes;
3. where the likeliest label is not the draft that was read on, it takes the draft's place, and what
   follows it in that candidate is read again; the old tokens stay in the cache, hidden by the mask.
   Later verdicts are drafted anew as that pass thought likeliest: seldom does one verdict turn the
   next;
4. the questions that end an interview (the reply, in either order) come last and stand side by side;
   the mask keeps them from seeing each other.

For three steps that makes three to five passes, however many candidates there are.

Every label is chosen from the same logits that greedy decoding would have seen, up to the rounding of
a batched product. Because positions are given and masks are built here, nothing depends on what a
model keeps on its modules (Qwen2.5-VL's `rope_deltas`).

A draft is one token in the place of another, so the conversation must be the same tokens up to a
verdict whatever the verdict is. Chat templates that rewrite earlier turns break that; it is checked
for each candidate, and one that fails is asked naively.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from compeer_core.backends.protocol import Answers, Interview, Message, with_question
from compeer_core.backends.transformers_.model import ChatModel
from compeer_core.backends.transformers_.sequence_state import Encoded, Track

LOGITS_BYTES = 512 << 20
"""Memory that the logits of one pass may take; the candidates are cut into parts by it."""
WRONG_DRAFTS = 0.25
"""How many drafts are taken to be wrong: COMPEER's annotators found 23 % of steps wrong."""
PASS_TOKENS = {"cpu": 24}
"""How many tokens could be read in the time that a pass takes by itself. Of COMPEER-nano on a
processor, by a fit to `benchmark judging`."""
PASS_TOKENS_ELSEWHERE = 500
"""On an accelerator a pass reads all weights of a model and launches hundreds of kernels; for 7 B
weights that is worth some hundred tokens by arithmetic. Not measured."""
QUESTIONS_A_ROW = 5
"""Three steps, and the reply in two orders: at so many places of each candidate logits are taken."""

Bools = NDArray[np.bool_]


class NotAChainError(Exception):
    """The tokens before a verdict depend on the verdicts after it, or on how it was drafted."""


@dataclass
class Plan:
    """The tokens of one interview as a tree: a trunk, and the branches that end it.

    Nodes are numbered: those of the trunk by their place in the conversation, then the branches one
    after another.
    """

    tokens: list[int]
    positions: list[int]
    """Of each node, without the model's own offset."""
    trunk: int
    """How many nodes the trunk has; the first branch belongs to it."""
    branches: list[tuple[int, int, int]]
    """Of each further branch: its first node, the node behind its last, and how many nodes of the
    trunk come before it."""
    chain: list[int]
    """The node of each drafted verdict; it is read at the node before."""
    ends: list[int]
    """The node at which each ending question is read."""
    chain_labels: list[tuple[int, ...]]
    end_labels: list[tuple[int, ...]]

    def visible(self) -> Bools:
        """Return which node sees which, shape (nodes, nodes): row sees column."""
        count = len(self.tokens)
        sees = np.tri(count, dtype=np.bool_)
        for first, behind, shared in self.branches:
            sees[first:behind, shared:first] = False
        return sees

    @property
    def first_read(self) -> int:
        """The earliest node at which a verdict is read."""
        return min([*(node - 1 for node in self.chain), *self.ends])


@dataclass
class _Row:
    """One interview under way."""

    plan: Plan
    sees: Bools
    slots: list[int] = field(default_factory=list)
    """For each place of the cache behind the shared part: the node that it holds, -1 for none."""
    settled: int = 0
    """Verdicts of the chain that stand."""
    next_node: int = 0
    """From here on the nodes have to be read (again)."""
    logits: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """Nodes that have not been read."""
        return len(self.plan.tokens) - self.next_node

    @property
    def certain(self) -> int:
        """Nodes that can be read before the next verdict has to be known."""
        if self.settled == len(self.plan.chain):
            return self.left
        return self.plan.chain[self.settled] - self.next_node

    @property
    def chained(self) -> int:
        """Nodes that can be read if all drafts of the chain are taken for right."""
        if self.settled == len(self.plan.chain):
            return self.left
        return self.plan.chain[-1] - self.next_node


@dataclass
class Work:
    """What judging has cost: forward passes, and tokens that were read in them, padding included."""

    passes: int = 0
    tokens: int = 0


def plan_interview(
    chat: ChatModel,
    messages: Sequence[Message],
    interview: Interview,
    tokens_of: Callable[[Sequence[str]], tuple[int, ...]],
    like: Encoded | None = None,
) -> tuple[Plan, Encoded]:
    """Lay out an interview with every verdict of its chain drafted as the first label.

    Args:
        chat: The model.
        messages: What the judge reads before the first question.
        interview: What it is asked.
        tokens_of: Gives the token of each label.
        like: The same messages as they were encoded before; spares preparing the pictures again.

    Returns:
        The plan, and the conversation up to the first ending question as it was encoded.

    Raises:
        NotAChainError: This chat template does not allow it.
    """
    said = list(messages)
    chain: list[int] = []
    at_verdict: list[tuple[int, ...]] = []
    for asked in interview.chain:
        said = with_question(said, asked.text)
        at_verdict.append(chat.encode(said, like=like).ids)
        chain.append(len(at_verdict[-1]))
        said = [*said, Message("assistant", (asked.labels[0],))]
    conversations = [
        chat.encode(with_question(said, asked.text), like=like) for asked in interview.ends
    ]
    if not conversations:
        conversations = [chat.encode(said, reply=False, like=like)]
    trunk = conversations[0]
    tokens = list(trunk.ids)
    behind_chain = chain[-1] + 1 if chain else 0
    for asked, before in zip(interview.chain, at_verdict, strict=True):
        place = len(before)
        draft = tokens[place : place + 1]
        if tuple(tokens[:place]) != before or draft != [tokens_of(asked.labels)[0]]:
            raise NotAChainError
    positions = list(range(len(tokens)))
    ends = [len(tokens) - 1] if interview.ends else []
    branches: list[tuple[int, int, int]] = []
    for other in conversations[1:]:
        shared = _common(trunk.ids, other.ids)
        shared = min(shared, len(other.ids) - 1)  # a question has a token of its own to be read at
        if shared < behind_chain:
            raise NotAChainError
        first = len(tokens)
        tokens += other.ids[shared:]
        positions += range(shared, len(other.ids))
        branches.append((first, len(tokens), shared))
        ends.append(len(tokens) - 1)
    plan = Plan(
        tokens=tokens,
        positions=positions,
        trunk=len(trunk.ids),
        branches=branches,
        chain=chain,
        ends=ends,
        chain_labels=[tokens_of(asked.labels) for asked in interview.chain],
        end_labels=[tokens_of(asked.labels) for asked in interview.ends],
    )
    return plan, trunk


def answer_all(
    chat: ChatModel, plans: Sequence[Plan], encoded: Encoded, track: Track, work: Work
) -> list[Answers]:
    """Answer planned interviews about one conversation.

    Args:
        chat: The model; its owner thread runs this.
        plans: At least one, all with the same history and pictures.
        encoded: Any encoding of their conversation: what it has beside tokens is used.
        track: Holds what was read of the history, and receives what is read of it now.
        work: Is added to.
    """
    shared = _shared(plans)
    track.become(replace(encoded, ids=tuple(plans[0].tokens[:shared])))
    unread = shared - min(track.read, shared - 1)
    chat.run(track, 1)
    work.passes += 1
    work.tokens += unread
    vocabulary = int(chat.model.config.get_text_config().vocab_size)
    at_once = max(1, int((LOGITS_BYTES / (4 * QUESTIONS_A_ROW * vocabulary)) ** 0.5))
    answers: list[Answers] = []
    for begin in range(0, len(plans), at_once):
        rows = [_Row(plan, plan.visible()) for plan in plans[begin : begin + at_once]]
        _read(chat, rows, shared, track, work)
        answers += [_answers(row) for row in rows]
    return answers


def _shared(plans: Sequence[Plan]) -> int:
    """Return how many tokens all plans begin with, and leave each one to be read at."""
    first, *others = (plan.tokens[: plan.trunk] for plan in plans)
    shared = len(first)
    for tokens in others:
        shared = min(shared, _common(first, tokens))
    limits = [min([plan.first_read, *(start for _, _, start in plan.branches)]) for plan in plans]
    return min(shared, *limits)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _read(chat: ChatModel, rows: list[_Row], shared: int, track: Track, work: Work) -> None:
    """Read the rows until every verdict of every chain stands."""
    cache = copy.deepcopy(track.cache)
    cache.batch_repeat_interleave(len(rows))
    # The tokens of the cache were read with this offset between places and positions.
    offset = track.offset
    for row in rows:
        row.next_node = shared
    while rows:
        width = width_of_pass(rows, chat.model.device.type)
        _pass(chat, rows, shared, offset, cache, work, width)
        again = [place for place, row in enumerate(rows) if not _settle(row)]
        if again:
            cache.batch_select_indices(torch.tensor(again, device=chat.model.device))
        rows = [rows[place] for place in again]


def width_of_pass(rows: Sequence[_Row], device: str) -> int:
    """Return how many nodes of each row the next pass reads: as many as pay."""
    certain = max(row.certain for row in rows)
    ahead = sum(row.chained - row.certain for row in rows)
    spared = max(len(row.plan.chain) - row.settled for row in rows) - 1
    a_pass = PASS_TOKENS.get(device, PASS_TOKENS_ELSEWHERE)
    if WRONG_DRAFTS * ahead <= a_pass * spared:
        return max(row.chained for row in rows)
    return certain


def _pass(
    chat: ChatModel,
    rows: list[_Row],
    shared: int,
    offset: int,
    cache: Any,
    work: Work,
    width: int,
) -> None:
    device, dtype = chat.model.device, chat.model.dtype
    pending = [range(row.next_node, row.next_node + min(width, row.left)) for row in rows]
    before = len(rows[0].slots)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    positions = torch.zeros_like(ids)
    allowed = np.zeros((len(rows), width, shared + before + width), dtype=np.bool_)
    allowed[:, :, :shared] = True
    wanted: list[list[int]] = []
    for number, (row, nodes) in enumerate(zip(rows, pending, strict=True)):
        plan = row.plan
        ids[number] = plan.tokens[-1]  # padding: any token that is no picture
        ids[number, : len(nodes)] = torch.tensor([plan.tokens[node] for node in nodes])
        positions[number, : len(nodes)] = torch.tensor([plan.positions[node] for node in nodes])
        row.slots += [*nodes, *[-1] * (width - len(nodes))]
        row.next_node += len(nodes)
        held = np.array(row.slots)
        seen = row.sees[np.ix_(np.array(nodes), np.maximum(held, 0))] & (held >= 0)
        allowed[number, : len(nodes), shared:] = seen
        reads = {*(node - 1 for node in plan.chain[row.settled :]), *plan.ends}
        wanted.append([place for place, node in enumerate(nodes) if node in reads])
    columns = sorted({place for places in wanted for place in places})
    mask = torch.zeros(allowed.shape, dtype=dtype)
    mask.masked_fill_(torch.from_numpy(~allowed), torch.finfo(dtype).min)
    positions += offset
    if chat.has_offsets:
        positions = positions.expand(3, *positions.shape)
    with torch.inference_mode():
        outputs = chat.model(
            input_ids=ids.to(device),
            attention_mask=mask[:, None].to(device),
            position_ids=positions.to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor(columns, device=device),
        )
    for number, (row, nodes) in enumerate(zip(rows, pending, strict=True)):
        for place in wanted[number]:
            row.logits[nodes[place]] = outputs.logits[number, columns.index(place)].float().cpu()
    work.passes += 1
    work.tokens += len(rows) * width


def _settle(row: _Row) -> bool:
    """Walk along the chain as far as it has been read; correct the first draft that is wrong.

    Those after it become what was likeliest after the wrong draft, a better guess than the first.

    Returns:
        Whether all of the row stands.
    """
    plan, count = row.plan, len(row.plan.chain)
    read = row.next_node
    while row.settled < count and plan.chain[row.settled] <= read:
        number = row.settled
        node, best = plan.chain[number], _likeliest(row, number)
        wrong = best != plan.tokens[node]
        plan.tokens[node] = best
        row.settled += 1
        if wrong and node < read:
            for later in range(row.settled, count):
                if plan.chain[later] <= read:
                    plan.tokens[plan.chain[later]] = _likeliest(row, later)
            row.next_node = node
            row.slots = [-1 if held >= node else held for held in row.slots]
            break
    return row.settled == count and (row.left == 0 or not plan.ends)


def _likeliest(row: _Row, number: int) -> int:
    """Return the token of the label that the last pass chose for a verdict of the chain."""
    labels = row.plan.chain_labels[number]
    return labels[int(row.logits[row.plan.chain[number] - 1][list(labels)].argmax())]


def _answers(row: _Row) -> Answers:
    plan = row.plan
    chain = zip((node - 1 for node in plan.chain), plan.chain_labels, strict=True)
    ends = zip(plan.ends, plan.end_labels, strict=True)
    return Answers(
        tuple(_probabilities(row.logits[node], labels) for node, labels in chain),
        tuple(_probabilities(row.logits[node], labels) for node, labels in ends),
    )


def _probabilities(logits: torch.Tensor, labels: Sequence[int]) -> tuple[float, ...]:
    return tuple(torch.softmax(logits[list(labels)], dim=-1).tolist())
