"""Who holds which slot, what is still to prefill, who draws: the host side of the sampler.

The scheduler serves conversations. Whoever owns one gives it a slot (`open`), brings a prompt
(`extend`), gets the response back from `collect`, and gives the slot up (`close`). It neither knows nor
waits for environments: between `extend` and the response the other slots go on.
"""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from turnppo_jax.rollout.sampler import Sampler, Sampling
from turnppo_jax.types import StopReason


@dataclasses.dataclass(frozen=True)
class Response:
    """A finished response.

    Attributes:
      slot: which conversation.
      ids: [R] int32, what was sampled.
      logprobs: [R] float32.
      stop: why it ended.
    """

    slot: int
    ids: np.ndarray
    logprobs: np.ndarray
    stop: StopReason


@dataclasses.dataclass
class _Slot:
    """One conversation. Its context is `length` cached tokens, `todo`, and the pending token."""

    key: np.ndarray  # [2] uint32
    length: int = 0
    pending: int | None = None
    todo: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    budget: int = 0
    budget_stop: StopReason = StopReason.TURN_LIMIT
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)

    @property
    def context(self) -> int:
        return self.length + len(self.todo) + (self.pending is not None)

    @property
    def decoding(self) -> bool:
        return self.budget > 0 and not len(self.todo)


class Scheduler:
    """Moves conversations through prefill and decoding.

    Args:
      sampler: the device side.
      sampling: temperature, top-p, top-k of every draw.
      decode_text: ids -> text, for stop strings.
      stop_strings: a response ends with the token that completes one of them.
    """

    def __init__(
        self,
        sampler: Sampler,
        sampling: Sampling,
        decode_text: Callable[[list[int]], str],
        stop_strings: tuple[str, ...] = (),
    ):
        self._sampler = sampler
        self._sampling = sampling
        self._decode_text = decode_text
        self._stop_strings = stop_strings
        self._eos = frozenset(int(i) for i in sampler.eos_ids)
        self._slots: list[_Slot | None] = [None] * sampler.settings.num_slots
        self._in_flight = None
        self.counts = (
            collections.Counter()
        )  # prefill_tokens, prefill_calls, sampled_tokens, discarded_tokens, decode_calls

    @property
    def context_length(self) -> int:
        """Tokens that a conversation may have, `C`."""
        return self._sampler.settings.context_length

    @property
    def busy(self) -> bool:
        """Whether `launch` has anything to do."""
        return any(slot and (len(slot.todo) or slot.budget) for slot in self._slots)

    def open(self, slot: int, key: np.ndarray) -> None:
        """Gives a free slot to a new conversation whose tokens are drawn with `key` ([2] uint32 key data)."""
        if self._slots[slot] is not None:
            raise ValueError(f"slot {slot} is held by another conversation")
        self._slots[slot] = _Slot(key=np.asarray(key, np.uint32))

    def close(self, slot: int) -> None:
        """Frees a slot."""
        self._slots[slot] = None

    def context(self, slot: int) -> int:
        """Tokens of the slot's conversation so far."""
        return self._slots[slot].context

    def room(self, slot: int) -> int:
        """Tokens that the slot's conversation may still grow by."""
        return self.context_length - self.context(slot)

    def extend(self, slot: int, prompt_ids: np.ndarray, max_new_tokens: int) -> None:
        """Appends a prompt and asks for a response of at most `max_new_tokens`.

        Raises:
          ValueError: the prompt leaves no room for one token, or a response is still being drawn.
        """
        state = self._slots[slot]
        room = self.room(slot) - len(prompt_ids)
        if state.budget or not len(prompt_ids) or room < 1 or max_new_tokens < 1:
            raise ValueError(
                f"slot {slot}: cannot draw up to {max_new_tokens} tokens after a prompt of {len(prompt_ids)} "
                f"with room for {self.room(slot)}"
            )
        known = [] if state.pending is None else [state.pending]
        state.todo = np.concatenate([np.asarray(known, np.int32), np.asarray(prompt_ids[:-1], np.int32)])
        state.pending = int(prompt_ids[-1])
        state.budget = min(max_new_tokens, room)
        state.budget_stop = StopReason.TURN_LIMIT if max_new_tokens <= room else StopReason.CONTEXT_LIMIT
        state.ids, state.logprobs = [], []

    def launch(self) -> None:
        """Sends one round to the device: a piece of prefill for each waiting prompt, then a chunk of decoding."""
        if self._in_flight is not None:
            raise RuntimeError("launch was called twice without collect")
        self._prefill_pieces()
        if not any(slot and slot.decoding for slot in self._slots):
            return
        num = len(self._slots)
        pending, budgets = np.zeros(num, np.int32), np.zeros(num, np.int32)
        keys = np.zeros((num, 2), np.uint32)
        for index, slot in enumerate(self._slots):
            if slot and slot.decoding:
                pending[index], budgets[index], keys[index] = slot.pending, slot.budget, slot.key
        drawers = [index for index in range(num) if budgets[index]]
        self._in_flight = drawers, self._sampler.decode(self._lengths(), pending, budgets, keys, self._sampling)
        self.counts["decode_calls"] += 1

    def collect(self) -> list[Response]:
        """Waits for the round that `launch` sent and returns the responses that ended in it."""
        if self._in_flight is None:
            return []
        drawers, (tokens, logprobs) = self._in_flight
        self._in_flight = None
        tokens, logprobs = np.asarray(tokens), np.asarray(logprobs)
        responses = []
        for index in drawers:
            num = int(np.sum(tokens[index] >= 0))
            response = self._take(index, tokens[index, :num].tolist(), logprobs[index, :num].tolist())
            if response:
                responses.append(response)
        return responses

    def _lengths(self) -> np.ndarray:
        return np.asarray([slot.length if slot else 0 for slot in self._slots], np.int32)

    def _prefill_pieces(self) -> None:
        settings, shards = self._sampler.settings, self._sampler.data_shards
        shard_slots = settings.num_slots // shards
        waiting = collections.defaultdict(lambda: [[] for _ in range(shards)])  # bucket -> data shard -> slots
        for index, slot in enumerate(self._slots):
            if slot and len(slot.todo):
                bucket = settings.bucket(min(len(slot.todo), settings.prefill_chunk))
                waiting[bucket][index // shard_slots].append(index)
        for bucket, by_shard in sorted(waiting.items()):
            for start in range(0, max(map(len, by_shard)), settings.prefill_rows):
                self._prefill_call(bucket, [queue[start : start + settings.prefill_rows] for queue in by_shard])

    def _prefill_call(self, bucket: int, by_shard: list[list[int]]) -> None:
        """One piece for some slots of each data shard, in rows of that shard."""
        shard_rows = self._sampler.settings.prefill_rows
        rows = shard_rows * len(by_shard)
        slots = np.full(rows, -1, np.int32)
        tokens, counts = np.zeros((rows, bucket), np.int32), np.zeros(rows, np.int32)
        lengths = self._lengths()
        for shard, indices in enumerate(by_shard):
            for row, index in enumerate(indices, start=shard * shard_rows):
                slot = self._slots[index]
                piece = slot.todo[:bucket]
                slots[row], counts[row], tokens[row, : len(piece)] = index, len(piece), piece
                slot.todo = slot.todo[len(piece) :]
                slot.length += len(piece)
        self._sampler.prefill(lengths, slots, tokens, counts)
        self.counts["prefill_calls"] += 1
        self.counts["prefill_tokens"] += int(counts.sum())

    def _take(self, index: int, tokens: list[int], logprobs: list[float]) -> Response | None:
        """Adds drawn tokens to the slot; the response if it has ended."""
        slot = self._slots[index]
        before = len(slot.ids)
        slot.ids += tokens
        slot.logprobs += logprobs
        slot.length += len(tokens)
        slot.budget -= len(tokens)
        stop = self._why_stopped(slot)
        cut = self._first_stop_string(slot.ids, before)
        if cut is not None:
            excess = len(slot.ids) - cut
            if excess or slot.ids[-1] not in self._eos:
                stop = StopReason.STOP_STRING
            del slot.ids[cut:], slot.logprobs[cut:]
            slot.length -= excess
            self.counts["discarded_tokens"] += excess
        slot.pending = slot.ids[-1]
        self.counts["sampled_tokens"] += len(slot.ids) - before
        if stop is None:
            return None
        slot.budget = 0
        return Response(index, np.asarray(slot.ids, np.int32), np.asarray(slot.logprobs, np.float32), stop)

    def _why_stopped(self, slot: _Slot) -> StopReason | None:
        if slot.ids[-1] in self._eos:
            return StopReason.EOS
        return slot.budget_stop if slot.budget == 0 else None

    def _first_stop_string(self, ids: list[int], before: int) -> int | None:
        """Number of tokens after which the decoded text first holds a stop string, looking beyond `before`."""
        if not self._stop_strings:
            return None
        for end in range(before + 1, len(ids) + 1):
            text = self._decode_text(ids[:end])
            if any(stop in text for stop in self._stop_strings):
                return end
        return None
