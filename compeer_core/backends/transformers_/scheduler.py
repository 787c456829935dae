"""Share one set of weights between turns that are generated at the same time.

The owner thread generates in slices; each slice is one job in its queue:

* A turn that is alone runs `model.generate`.
* Turns with the same adapter form a batch. Each has a cache of its own; they are joined, stay joined over slices while
  the batch has the same turns, and then each turn gets its part back. Until then its own cache lacks the newest tokens,
  and is valid without them. Turns join and leave at a token. What a turn has to read first (its prompt, or text that was
  written into it) it reads alone; the beginning that another open turn or an earlier one has read is copied from there.
* Turns with different adapters, and caches that cannot be joined, take turns. (peft can apply an
  adapter per row of a batch, but a pass of two such rows took 1.02 times as long as two passes.)

With a model of 10 million weights on one core, two turns at once take 0.76 of the time of one after the other, and
four 0.40 (medians of three, 100 tokens each, prompts included).

A slice ends after a tenth of a second when another job waits for the thread (a judge, a new
visitor's prompt) or turns with another adapter do, and goes to the end of the queue.

Each row samples with its own `Sampler` from its own logits, and does not wait for its reader. A
batch can change the last bits of the logits, since a product of several rows is summed in another
order. In 32 bits a seed therefore gives the same text as alone unless two tokens are equally
probable up to rounding, about one token in a million. In 16 bits, with coarser rounding, texts may
differ. They may also differ where a turn alone reads compressed weights (`packed_step`), which batches
do not. In 8 bits (bitsandbytes) rows would affect each other beyond that, and are not joined.

If a batch fails, its rows are generated one by one, so that only the faulty one fails.
"""

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from transformers import StoppingCriteria

from compeer_core.backends.transformers_.kv_cache import is_plain, joined, restore_cache
from compeer_core.backends.transformers_.model import ChatModel
from compeer_core.backends.transformers_.sampler import Sampler
from compeer_core.backends.transformers_.sequence_state import SequenceState
from compeer_core.errors import BackendError, CompeerError
from compeer_core.logs import brief, trace_of

logger = logging.getLogger(__name__)

SLICE_SECONDS = 0.1
"""How long a slice may hold the owner thread while another job waits."""
ROOM = 64
"""New tokens that a joined cache has room for, and so the most of a slice."""


class Row(Protocol):
    """A part of a turn that is to be generated."""

    alone: bool
    """Whether it was in a batch that failed."""

    @property
    def state(self) -> SequenceState: ...

    @property
    def sampler(self) -> Sampler: ...

    @property
    def left(self) -> int:
        """Tokens left in its budget."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether it needs no more tokens: finished, stopped, closed or failed."""
        ...

    def take(self, token: int) -> None:
        """Add the next token."""
        ...

    def fail(self, error: CompeerError) -> None:
        """End the turn with an error."""
        ...

    def end(self) -> None:
        """Close the row: no more tokens come. Called once, after a failure too."""
        ...


class Scheduler:
    """Generates the turns of one set of weights.

    Attributes:
        chat: The weights.
        states: The states of all open turns, including one that waits for its judge.
    """

    def __init__(self, chat: ChatModel) -> None:
        self.chat = chat
        self._lock = threading.Lock()
        self._arrived: list[Row] = []
        self._queued = False  # a slice is queued or running; it will take `_arrived`
        # What follows is touched by the owner thread alone.
        self.states: weakref.WeakSet[SequenceState] = weakref.WeakSet()
        self._rows: list[Row] = []
        self._batches: list[_Batch] = []  # those that are joined

    def add(self, row: Row) -> None:
        """Queue a row for generation from the next token on.

        Raises:
            BackendError: The model was closed.
        """
        with self._lock:
            if not self._queued:
                self.chat.owner.submit(self._run_slice)
                self._queued = True
            self._arrived.append(row)

    # --- on the owner thread -------------------------------------------------------------------

    def _run_slice(self) -> None:
        with self._lock:
            self._rows += self._arrived
            self._arrived = []
        for batch in [batch for batch in self._batches if any(row.is_over for row in batch.rows)]:
            self._split(batch)
        self._remove_finished()
        group = self._next_batch()
        if group:
            others = [row for row in self._rows if row not in group]
            self._generate(group, self._end_of_slice(bool(others)))
            self._rows = [*others, *group]
            self._remove_finished()
        with self._lock:
            self._queued = bool(self._rows or self._arrived)
            if not self._queued:
                return
            try:
                self.chat.owner.submit(self._run_slice)
                return
            except BackendError:  # the model was closed, which ends all turns
                stranded = [*self._rows, *self._arrived]
                self._rows, self._arrived, self._batches, self._queued = [], [], [], False
        for row in stranded:
            row.end()

    def _remove_finished(self) -> None:
        over = [row for row in self._rows if row.is_over]
        self._rows = [row for row in self._rows if row not in over]
        for row in over:
            row.end()

    def _next_batch(self) -> list[Row]:
        """Return the next row, and those that can be generated with it."""
        if not self._rows:
            return []
        first = self._rows[0]
        if not self._can_batch(first):
            return [first]
        adapter = first.state.adapter
        return [row for row in self._rows if row.state.adapter == adapter and self._can_batch(row)]

    def _can_batch(self, row: Row) -> bool:
        if row.alone or getattr(self.chat.model, "is_loaded_in_8bit", False):
            return False
        return row.state.cache is None or is_plain(row.state.cache)

    def _end_of_slice(self, others_wait: bool) -> Callable[[], bool]:
        """Return a function that tells whether the slice, which begins now, ends at this token."""
        start = time.monotonic()

        def ends() -> bool:
            if self._arrived:
                return True
            late = time.monotonic() - start > SLICE_SECONDS
            return late and (others_wait or self.chat.owner.has_waiting_job)

        return ends

    def _generate(self, group: Sequence[Row], ends: Callable[[], bool]) -> None:
        for batch in [batch for batch in self._batches if {*batch.rows} & {*group}]:
            if batch.goes_on_with(group):
                self._generate_batch(batch.rows, ends, batch)
                return
            self._split(batch)
        for row in group:
            if not row.state.read:
                with self._guard(row):
                    row.state.copy_from([*self.states, *self.chat.stored])
        unread = [row for row in group if row.state.unread > 1]
        if unread:  # read and generate one token: further ones need other threads or company
            self._generate_alone(unread[0], lambda: True)
        elif len(group) == 1:
            self._generate_alone(group[0], ends)
        else:
            self._generate_batch(group, ends)

    @contextlib.contextmanager
    def _guard(self, row: Row) -> Iterator[None]:
        """Turn an error of the model into the end of the turn; the thread survives."""
        try:
            yield
        except CompeerError as error:
            row.fail(error)
        except Exception as error:  # noqa: BLE001  (passed to the row)
            logger.error("%s failed while generating: %s", self.chat.name, trace_of(error))
            row.state.reset()
            failure = BackendError(f"{self.chat.name} failed while generating: {brief(error)}")
            failure.__cause__ = error
            row.fail(failure)

    def _generate_alone(self, row: Row, ends: Callable[[], bool]) -> None:
        def take(token: int) -> bool:
            row.take(token)
            return row.is_over or ends()

        if row.is_over:
            return
        with self._guard(row):
            self.chat.run(row.state, row.left, [row.sampler], [_EveryToken(take)])

    @torch.inference_mode()
    def _generate_batch(
        self, rows: Sequence[Row], ends: Callable[[], bool], batch: "_Batch | None" = None
    ) -> None:
        """Generate tokens for all rows until one of them is over.

        Args:
            rows: At least two.
            ends: Whether the slice ends at this token.
            batch: That of the rows if they are joined.
        """
        try:
            if batch is None:
                batch = _Batch(self.chat, rows)
                self._batches.append(batch)
            else:
                batch.activate()
            while batch.room:
                for row, logits in zip(rows, batch.step(), strict=True):
                    with self._guard(row):
                        ids = torch.tensor([row.state.ids], device=logits.device)
                        row.take(int(row.sampler(ids, logits).argmax(-1)))
                if any(row.is_over for row in rows):
                    break
                if ends():
                    return
            self._split(batch)
        except Exception as error:  # noqa: BLE001  (each row raises it again, alone)
            logger.warning(
                "%s failed on %d turns at once: %s", self.chat.name, len(rows), trace_of(error)
            )
            self._batches = [other for other in self._batches if other is not batch]
            for row in rows:
                row.alone = True
                row.state.reset()

    @torch.inference_mode()
    def _split(self, batch: "_Batch") -> None:
        """Give each turn of a batch its cache back; if that fails, its turns read their text again."""
        self._batches.remove(batch)
        try:
            batch.split()
        except Exception as error:  # noqa: BLE001  (a slice that raises would end all turns)
            logger.warning("%s failed to split a batch: %s", self.chat.name, trace_of(error))
            for row in batch.rows:
                row.state.reset()


class _EveryToken(StoppingCriteria):
    """Passes each new token to the row, and stops when the row is over."""

    def __init__(self, take: Callable[[int], bool]) -> None:
        self._take = take
        self._done = False

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        # Some devices generate one token more after the criterion: it is ignored.
        self._done = self._done or self._take(int(input_ids[0, -1]))
        return torch.full((1,), self._done, dtype=torch.bool, device=input_ids.device)


class _Batch:
    """Rows with one unread token each, and their joined caches.

    Attributes:
        rows: The rows, in the order of the joined cache.
        room: Tokens that each row can still be given.
    """

    def __init__(self, chat: ChatModel, rows: Sequence[Row]) -> None:
        self._chat = chat
        self.rows = list(rows)
        self.activate()
        states = self._states
        for state in states:
            state.forget(state.read - (len(state.ids) - 1))
        self._read = [state.ids[:-1] for state in states]
        self._length = max(state.read for state in states)
        self._padding = [self._length - state.read for state in states]
        device, dtype = chat.model.device, chat.model.dtype
        self._cache = joined([state.cache for state in states], [1] * len(states), ROOM)
        self.room = ROOM
        self._mask: torch.Tensor | None = None
        if any(self._padding):
            mask = torch.zeros((len(states), 1, 1, self._length + ROOM), dtype=dtype)
            for row, padding in enumerate(self._padding):
                mask[row, ..., :padding] = torch.finfo(dtype).min
            self._mask = mask.to(device)

    @property
    def _states(self) -> list[SequenceState]:
        return [row.state for row in self.rows]

    def activate(self) -> None:
        """Prepare the model for `step`, after other jobs have used it."""
        self._chat.activate(self.rows[0].state.adapter)
        self._chat.set_threads(len(self.rows))

    def goes_on_with(self, rows: Sequence[Row]) -> bool:
        """Whether the next step of these rows continues the batch: no row or token was added or removed."""
        return (
            self.room > 0
            and {*rows} == {*self.rows}
            and all(
                state.ids[:-1] == read for state, read in zip(self._states, self._read, strict=True)
            )
        )

    def step(self) -> list[torch.Tensor]:
        """Read the last token of each state; return the next logits, each of shape (1, vocabulary)."""
        self._length += 1
        self.room -= 1
        device, states = self._chat.model.device, self._states
        for state, read in zip(states, self._read, strict=True):
            read.append(state.ids[-1])
        ids = torch.tensor([state.ids[-1:] for state in states], device=device)
        positions = torch.tensor(
            [[len(state.ids) - 1 + state.offset] for state in states], device=device
        )
        outputs = self._chat.model(
            input_ids=ids,
            attention_mask=None if self._mask is None else self._mask[..., : self._length],
            position_ids=positions.expand(3, *positions.shape)
            if self._chat.has_offsets
            else positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        return list(outputs.logits[:, -1].float().split(1))

    def split(self) -> None:
        """Write what was read back into the caches of the states."""
        places = zip(self._states, self._read, self._padding, strict=True)
        for row, (state, read, padding) in enumerate(places):
            # Without a cache its turn has failed or is closed; with other tokens its own cache is the newer one.
            if state.cache is not None and state.ids[: len(read)] == read:
                restore_cache(self._cache, row, padding, state.cache)
