"""Turns that are written at the same time share the weights: one forward pass gives each a token.

`Rounds` knows the turns that are being written on one set of weights. Their threads wait for text;
the owner thread writes in rounds, each of which is one job of its queue:

* A turn that is alone is `model.generate`, in slices.
* Turns with the same adapter form a batch. Each keeps a cache of its own; for a round these are
  joined, and handed back when it ends. So between two jobs no turn knows of another one. A turn
  joins or leaves at a token: what it has to read first (its prompt, or text that was written for
  it) it reads by itself. A prompt that a turn still open has read is copied from there, so several
  turns drawn from one prompt read it once.
* Turns with other adapters, and caches that cannot be joined, are written by turns. (peft can apply
  an adapter for each row of a batch, but a pass of two such rows took 1.02 times as long as one
  pass after the other.)

With COMPEER-nano on one core, two turns at once take 0.76 of the time that they take one after the
other, and four 0.40 (medians of three, 100 tokens each, the reading of their prompts included).

A round ends after a tenth of a second when somebody else waits for the thread (a judge, a new
visitor's prompt) or turns with another adapter do, and goes to the end of the queue.

Each row's next token is chosen by its own `Choice` from its own logits, and nothing waits for
whoever reads the text. What a batch can change are the last bits of the logits, since a product of
several rows is added up in another order. So in 32 bits a seed gives the text that it gives alone
unless two tokens are equally likely up to rounding, about one token in a million; in 16 bits, where
roundings are coarse, it may give another one. In 8 bits (bitsandbytes) rows would change each other
beyond that, and are not joined.

If a batch fails, its rows are written one by one, so that only the one which is the reason fails.
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

from compeer_core.backends.transformers_.error_text import brief
from compeer_core.backends.transformers_.kv_cache import beginning, hand_back, is_plain, joined
from compeer_core.backends.transformers_.model import ChatModel
from compeer_core.backends.transformers_.sampler import Choice
from compeer_core.backends.transformers_.sequence_state import Track
from compeer_core.errors import BackendError, CompeerError
from compeer_core.logs import trace_of

logger = logging.getLogger(__name__)

SLICE_SECONDS = 0.1
"""How long a round may keep the owner thread while somebody else waits for it."""
ROOM = 64
"""Tokens that a joined cache has room for; then the round ends, and the next one makes more."""


class Row(Protocol):
    """A part of a turn that wants to be written."""

    alone: bool
    """Whether it was in a batch that failed."""

    @property
    def track(self) -> Track: ...

    @property
    def choice(self) -> Choice: ...

    @property
    def left(self) -> int:
        """Tokens that it may still have."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether it wants no more: it is finished, or was stopped, closed or given up."""
        ...

    def take(self, token: int) -> None:
        """Add the next token."""
        ...

    def fail(self, error: CompeerError) -> None:
        """End the turn with an error."""
        ...

    def end(self) -> None:
        """Nothing more will come. Called once, after a failure too."""
        ...


class Rounds:
    """Writes the turns of one set of weights.

    Attributes:
        chat: The weights.
        tracks: Those of all turns that are open, also of one that waits for its judge.
    """

    def __init__(self, chat: ChatModel) -> None:
        self.chat = chat
        self._lock = threading.Lock()
        self._arrived: list[Row] = []
        self._queued = False  # a round is waiting or running; it will look at `_arrived`
        # What follows is touched by the owner thread alone.
        self.tracks: weakref.WeakSet[Track] = weakref.WeakSet()
        self._rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Have a row written from the next token on.

        Raises:
            BackendError: The model was closed.
        """
        with self._lock:
            if not self._queued:
                self.chat.owner.submit(self._round)
                self._queued = True
            self._arrived.append(row)

    # --- on the owner thread -------------------------------------------------------------------

    def _round(self) -> None:
        with self._lock:
            self._rows += self._arrived
            self._arrived = []
        self._let_go()
        group = self._group()
        if group:
            others = [row for row in self._rows if row not in group]
            self._write(group, self._end_of_slice(bool(others)))
            self._rows = [*others, *group]
            self._let_go()
        with self._lock:
            self._queued = bool(self._rows or self._arrived)
            if not self._queued:
                return
            try:
                self.chat.owner.submit(self._round)
                return
            except BackendError:  # the model was closed, and all turns end with it
                stranded = [*self._rows, *self._arrived]
                self._rows, self._arrived, self._queued = [], [], False
        for row in stranded:
            row.end()

    def _let_go(self) -> None:
        over = [row for row in self._rows if row.is_over]
        self._rows = [row for row in self._rows if row not in over]
        for row in over:
            row.end()

    def _group(self) -> list[Row]:
        """The row whose turn it is, and those that can be written together with it."""
        if not self._rows:
            return []
        first = self._rows[0]
        if not self._joins(first):
            return [first]
        adapter = first.track.adapter
        return [row for row in self._rows if row.track.adapter == adapter and self._joins(row)]

    def _joins(self, row: Row) -> bool:
        if row.alone or getattr(self.chat.model, "is_loaded_in_8bit", False):
            return False
        return row.track.cache is None or is_plain(row.track.cache)

    def _end_of_slice(self, others_wait: bool) -> Callable[[], bool]:
        """Whether the round, which begins now, has to end at this token."""
        begun = time.monotonic()

        def ends() -> bool:
            if self._arrived:
                return True
            late = time.monotonic() - begun > SLICE_SECONDS
            return late and (others_wait or self.chat.owner.somebody_waits)

        return ends

    def _write(self, group: Sequence[Row], ends: Callable[[], bool]) -> None:
        for row in group:
            if not row.track.read:
                with self._guard(row):
                    self._share(row.track)
        behind = [row for row in group if row.track.unread > 1]
        if len(group) == 1:
            self._alone(group[0], ends)
        elif behind:
            self._alone(behind[0], lambda: True)
        else:
            self._together(group, ends)

    @contextlib.contextmanager
    def _guard(self, row: Row) -> Iterator[None]:
        """What a model runs into ends the turn; the thread must live on."""
        try:
            yield
        except CompeerError as error:
            row.fail(error)
        except Exception as error:  # noqa: BLE001  (told to the row)
            logger.error("%s failed while it wrote: %s", self.chat.name, trace_of(error))
            row.track.reset()
            failure = BackendError(f"{self.chat.name} failed while it wrote: {brief(error)}")
            failure.__cause__ = error
            row.fail(failure)

    def _share(self, track: Track) -> None:
        """Let a track have what another one has read of the same prompt."""
        prompt = len(track.encoded.ids)
        for other in self.tracks:
            if other.read >= prompt and is_plain(other.cache) and other.has_prompt_of(track):
                # Without its last token if that is the last of all: it has to be read again.
                track.cache = beginning(other.cache, min(prompt, len(track.ids) - 1))
                track.offsets = list(other.offsets)
                return

    def _alone(self, row: Row, ends: Callable[[], bool]) -> None:
        def take(token: int) -> bool:
            row.take(token)
            return row.is_over or ends()

        if row.is_over:
            return
        with self._guard(row):
            self.chat.run(row.track, row.left, [row.choice], [_EveryToken(take)])

    @torch.inference_mode()
    def _together(self, rows: Sequence[Row], ends: Callable[[], bool]) -> None:
        """Give each row one token after another, until one of them is over."""
        try:
            batch = _Batch(self.chat, [row.track for row in rows])
            for _ in range(ROOM):
                for row, logits in zip(rows, batch.step(), strict=True):
                    with self._guard(row):
                        ids = torch.tensor([row.track.ids], device=logits.device)
                        row.take(int(row.choice(ids, logits).argmax(-1)))
                if any(row.is_over for row in rows) or ends():
                    break
            batch.part()
        except Exception as error:  # noqa: BLE001  (each row meets it again, alone)
            logger.warning(
                "%s failed on %d turns at once: %s", self.chat.name, len(rows), trace_of(error)
            )
            for row in rows:
                row.alone = True
                row.track.reset()


class _EveryToken(StoppingCriteria):
    """Hands each new token to the row and stops when that says so."""

    def __init__(self, take: Callable[[int], bool]) -> None:
        self._take = take
        self._done = False

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        # Some devices are asked for one token more than the criterion wanted: it is not taken.
        self._done = self._done or self._take(int(input_ids[0, -1]))
        return torch.full((1,), self._done, dtype=torch.bool, device=input_ids.device)


class _Batch:
    """Tracks that have one token to read each, with their caches joined."""

    def __init__(self, chat: ChatModel, tracks: Sequence[Track]) -> None:
        self._chat = chat
        self._tracks = tracks
        chat.activate(tracks[0].adapter)
        for track in tracks:
            track.forget(track.read - (len(track.ids) - 1))
        self._length = max(track.read for track in tracks)
        self._padding = [self._length - track.read for track in tracks]
        device, dtype = chat.model.device, chat.model.dtype
        self._cache = joined([track.cache for track in tracks], [1] * len(tracks), ROOM)
        self._mask: torch.Tensor | None = None
        if any(self._padding):
            mask = torch.zeros((len(tracks), 1, 1, self._length + ROOM), dtype=dtype)
            for row, padding in enumerate(self._padding):
                mask[row, ..., :padding] = torch.finfo(dtype).min
            self._mask = mask.to(device)

    def step(self) -> list[torch.Tensor]:
        """Read the last token of each track; return the logits behind it, shape (1, vocabulary)."""
        self._length += 1
        device = self._chat.model.device
        ids = torch.tensor([track.ids[-1:] for track in self._tracks], device=device)
        positions = torch.tensor(
            [[len(track.ids) - 1 + track.offset] for track in self._tracks], device=device
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

    def part(self) -> None:
        """Give the tracks their caches back."""
        for row, (track, padding) in enumerate(zip(self._tracks, self._padding, strict=True)):
            if track.cache is not None:  # else its turn has failed
                hand_back(self._cache, row, padding, track.cache)
