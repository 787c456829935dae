"""Judge many candidates at once, with the same result as asking question by question.

A judge's later verdicts depend on its earlier ones. Asked naively, every verdict of every candidate
takes a pass over the whole conversation. Here it takes

1. one pass over what the candidates share (history, images, instructions); its cache is then
   repeated for each candidate;
2. passes over the steps, each up to the next verdict of every candidate. Tokens beyond that verdict
   can be read in the same pass on a *draft* of it, at first the question's first label (True). This
   is done where it costs less than another pass, and for free in rows that would otherwise be
   padded: they read ahead as far as the longest row goes;
3. a repair where the most probable label differs from the draft: the label replaces the draft, and
   what follows it in that candidate is read again. The old tokens stay in the cache, hidden by the
   mask. Later drafts become the labels that this pass preferred, since one verdict seldom changes
   the next;
4. the questions at the end (the reply, in both orders), side by side in the last pass; the mask
   keeps them from seeing each other.

For three steps this takes three to five passes, however many candidates there are.

Every label is chosen from the logits that greedy decoding would have seen, up to the rounding of a
batched product. Positions and masks are explicit, so nothing depends on state that a model keeps on
its modules (Qwen2.5-VL's `rope_deltas`).

A draft is one token in place of another, so the tokens up to a verdict must not depend on the
verdict. Chat templates that rewrite earlier turns break this. It is checked for each candidate, and
one that fails is asked question by question.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from compeer_core.backends.protocol import Answers, CandidateQuestions, Message, with_question
from compeer_core.backends.transformers_.model import ChatModel
from compeer_core.backends.transformers_.sequence_state import Encoded, SequenceState

LOGITS_BYTES = 512 << 20
"""Memory for the logits of one pass; more candidates are scored in parts."""
WRONG_DRAFTS = 0.25
"""Expected share of wrong drafts: COMPEER's annotators found 23 % of steps wrong."""
PASS_TOKENS = {"cpu": 24}
"""Fixed cost of a pass, in tokens. For a model of 10 million weights on a CPU, fitted to `benchmark judging`."""
PASS_TOKENS_ELSEWHERE = 500
"""On an accelerator a pass reads all weights and launches hundreds of kernels; for 7 B weights that
equals some hundred tokens by estimate. Not measured."""
QUESTIONS_A_ROW = 5
"""Positions of a candidate at which logits are read: three steps, and the reply in two orders."""

Bools = NDArray[np.bool_]


class NotAChainError(Exception):
    """The tokens before a verdict depend on later verdicts, or on its draft."""


@dataclass
class Plan:
    """The tokens of one candidate as a tree: a trunk, and one branch per further ending question.

    Nodes are numbered: the trunk by position in the conversation, then branch after branch.
    """

    tokens: list[int]
    positions: list[int]
    """Position of each node, without the model's own offset."""
    trunk: int
    """Nodes of the trunk; the first ending question belongs to it."""
    branches: list[tuple[int, int, int]]
    """For each branch: its first node, the node after its last, and the trunk nodes before it."""
    chain: list[int]
    """The node of each drafted verdict; its logits are read at the node before."""
    ends: list[int]
    """The node at which the logits of each ending question are read."""
    chain_labels: list[tuple[int, ...]]
    end_labels: list[tuple[int, ...]]

    def visible(self) -> Bools:
        """Return which node attends to which, shape (nodes, nodes): row to column."""
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
    """One candidate while it is scored."""

    plan: Plan
    sees: Bools
    slots: list[int] = field(default_factory=list)
    """The node in each cache position after the shared prefix, -1 for none."""
    settled: int = 0
    """Verdicts of the chain that are final."""
    next_node: int = 0
    """The first node that has to be read (again)."""
    logits: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """Nodes that are unread."""
        return len(self.plan.tokens) - self.next_node

    @property
    def certain(self) -> int:
        """Nodes that can be read before the next verdict is needed."""
        if self.settled == len(self.plan.chain):
            return self.left
        return self.plan.chain[self.settled] - self.next_node

    @property
    def chained(self) -> int:
        """Nodes that can be read if all drafts of the chain are right."""
        if self.settled == len(self.plan.chain):
            return self.left
        return self.plan.chain[-1] - self.next_node


@dataclass
class Work:
    """Cost of scoring so far: forward passes, and the tokens read in them, padding included."""

    passes: int = 0
    tokens: int = 0


def plan_candidate(
    chat: ChatModel,
    messages: Sequence[Message],
    candidate: CandidateQuestions,
    tokens_of: Callable[[Sequence[str]], tuple[int, ...]],
    like: Encoded | None = None,
) -> tuple[Plan, Encoded]:
    """Lay out a candidate with every verdict of its chain drafted as its first label.

    Args:
        chat: The model.
        messages: What the judge reads before the first question.
        candidate: Its questions.
        tokens_of: Returns the token of each label.
        like: An earlier encoding of the same messages; saves preparing the images again.

    Returns:
        The plan, and the encoded conversation up to the first ending question.

    Raises:
        NotAChainError: The chat template does not allow it.
    """
    conversation = list(messages)
    chain: list[int] = []
    at_verdict: list[tuple[int, ...]] = []
    for question in candidate.chain:
        conversation = with_question(conversation, question.text)
        at_verdict.append(chat.encode(conversation, like=like).ids)
        chain.append(len(at_verdict[-1]))
        conversation = [*conversation, Message("assistant", (question.labels[0],))]
    conversations = [
        chat.encode(with_question(conversation, question.text), like=like)
        for question in candidate.ends
    ]
    if not conversations:
        conversations = [chat.encode(conversation, reply=False, like=like)]
    trunk = conversations[0]
    tokens = list(trunk.ids)
    after_chain = chain[-1] + 1 if chain else 0
    for question, before in zip(candidate.chain, at_verdict, strict=True):
        place = len(before)
        draft = tokens[place : place + 1]
        if tuple(tokens[:place]) != before or draft != [tokens_of(question.labels)[0]]:
            raise NotAChainError
    positions = list(range(len(tokens)))
    ends = [len(tokens) - 1] if candidate.ends else []
    branches: list[tuple[int, int, int]] = []
    for other in conversations[1:]:
        shared = _common_length(trunk.ids, other.ids)
        shared = min(shared, len(other.ids) - 1)  # a question needs a token of its own
        if shared < after_chain:
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
        chain_labels=[tokens_of(question.labels) for question in candidate.chain],
        end_labels=[tokens_of(question.labels) for question in candidate.ends],
    )
    return plan, trunk


def score_plans(
    chat: ChatModel, plans: Sequence[Plan], encoded: Encoded, state: SequenceState, work: Work
) -> list[Answers]:
    """Answer planned candidates about one conversation.

    Args:
        chat: The model; its owner thread runs this.
        plans: At least one, all with the same history and images.
        encoded: Any encoding of their conversation; its inputs beside the tokens are used.
        state: What the model has read of the history; updated.
        work: Updated.
    """
    shared = _common_prefix(plans)
    state.set_prompt(replace(encoded, ids=tuple(plans[0].tokens[:shared])))
    unread = shared - min(state.read, shared - 1)
    chat.run(state, 1)
    work.passes += 1
    work.tokens += unread
    vocabulary = int(chat.model.config.get_text_config().vocab_size)
    at_once = max(1, int((LOGITS_BYTES / (4 * QUESTIONS_A_ROW * vocabulary)) ** 0.5))
    answers: list[Answers] = []
    for begin in range(0, len(plans), at_once):
        rows = [_Row(plan, plan.visible()) for plan in plans[begin : begin + at_once]]
        _read(chat, rows, shared, state, work)
        answers += [_answers(row) for row in rows]
    return answers


def _common_prefix(plans: Sequence[Plan]) -> int:
    """Return the length of the common prefix that leaves each plan a token to read."""
    first, *others = (plan.tokens[: plan.trunk] for plan in plans)
    shared = len(first)
    for tokens in others:
        shared = min(shared, _common_length(first, tokens))
    limits = [min([plan.first_read, *(start for _, _, start in plan.branches)]) for plan in plans]
    return min(shared, *limits)


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _read(chat: ChatModel, rows: list[_Row], shared: int, state: SequenceState, work: Work) -> None:
    """Read the rows until every verdict of every chain is final."""
    cache = copy.deepcopy(state.cache)
    cache.batch_repeat_interleave(len(rows))
    offset = state.offset
    for row in rows:
        row.next_node = shared
    while rows:
        width = pass_width(rows, chat.model.device.type)
        _pass(chat, rows, shared, offset, cache, work, width)
        again = [place for place, row in enumerate(rows) if not _accept_verdicts(row)]
        if again:
            cache.batch_select_indices(torch.tensor(again, device=chat.model.device))
        rows = [rows[place] for place in again]


def pass_width(rows: Sequence[_Row], device: str) -> int:
    """Return how many nodes of each row the next pass reads: as many as save time."""
    certain = max(row.certain for row in rows)
    ahead = sum(row.chained - row.certain for row in rows)
    spared = max(len(row.plan.chain) - row.settled for row in rows) - 1
    pass_cost = PASS_TOKENS.get(device, PASS_TOKENS_ELSEWHERE)
    if WRONG_DRAFTS * ahead <= pass_cost * spared:
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
        ids[number] = plan.tokens[-1]  # padding: any token but an image
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
    chat.set_threads(len(rows) * width)
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


def _accept_verdicts(row: _Row) -> bool:
    """Accept verdicts along the chain as far as it has been read; repair the first wrong draft.

    Later drafts become the most probable labels after the wrong one, a better guess than before.

    Returns:
        Whether the row is complete.
    """
    plan, count = row.plan, len(row.plan.chain)
    read = row.next_node
    while row.settled < count and plan.chain[row.settled] <= read:
        number = row.settled
        node, best = plan.chain[number], _best_label(row, number)
        wrong = best != plan.tokens[node]
        plan.tokens[node] = best
        row.settled += 1
        if wrong and node < read:
            for later in range(row.settled, count):
                if plan.chain[later] <= read:
                    plan.tokens[plan.chain[later]] = _best_label(row, later)
            row.next_node = node
            row.slots = [-1 if held >= node else held for held in row.slots]
            break
    return row.settled == count and (row.left == 0 or not plan.ends)


def _best_label(row: _Row, number: int) -> int:
    """Return the token of the most probable label for a verdict of the chain."""
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
