"""A sampler without a model whose every token depends on the whole context, and the environments that go with it."""

import os
import zlib

import numpy as np

from envs.small import EchoEnv
from turnppo_jax.rollout.sampler import SamplerSettings

SYMBOLS = "ABCD"


def say(chat, context, key):
    """The next token: a symbol drawn from context and key (no key: greedy), then the end-of-turn id."""
    if context[-1] != chat.first_prompt("x")[-1]:  # not the end of a prompt: the symbol stands
        return chat.end_id
    drawn = zlib.crc32(np.asarray([*context, *([] if key is None else key)], np.int64).tobytes())
    return int(chat.encode_text(SYMBOLS[drawn % len(SYMBOLS)])[0])


class ContextSampler:
    """Has the methods of `Sampler` that scheduler and collector use; holds the tokens of its slots as a cache would."""

    data_shards = 1

    def __init__(self, chat, num_slots=3, context_length=200):
        self.settings = SamplerSettings(num_slots, context_length, decode_chunk=2, prefill_chunk=16, prefill_rows=2)
        self.eos_ids = chat.eos_ids
        self._chat = chat
        self._cache = [[] for _ in range(num_slots)]

    def set_params(self, params):
        pass

    def prefill(self, lengths, slots, tokens, counts):
        for slot, row, count in zip(slots, tokens, counts):
            if slot >= 0:
                self._cache[slot] = self._cache[slot][: lengths[slot]] + row[:count].tolist()

    def decode(self, lengths, pending, budgets, keys, sampling):
        tokens = np.full((len(lengths), self.settings.decode_chunk), -1, np.int32)
        for slot in np.flatnonzero(budgets):
            context = self._cache[slot][: lengths[slot]] + [int(pending[slot])]
            assert len(context) == lengths[slot] + 1
            for i in range(min(budgets[slot], self.settings.decode_chunk)):
                tokens[slot, i] = say(self._chat, context, keys[slot] if sampling.temperature else None)
                if tokens[slot, i] in self.eos_ids:
                    break
                context.append(int(tokens[slot, i]))
            self._cache[slot] = context
        return tokens, np.zeros(tokens.shape, np.float32)


class CountingEnv(EchoEnv):
    """EchoEnv that counts its resets and steps over all objects, and raises at the texts that it is told to."""

    resets: list = []  # noqa: RUF012 - shared on purpose
    steps: list = []  # noqa: RUF012

    def __init__(self, num_turns: int = 3, breaks_at: str = "", fail_seeds: tuple = ()):
        super().__init__(num_turns=num_turns, partial=0.25)
        self.instructions = "say it"
        self._breaks_at, self._fail_seeds = breaks_at, fail_seeds
        self._seed = -1

    def reset(self, seed):
        self.resets.append(seed)
        self._seed = seed
        return super().reset(seed)

    def step(self, text):
        self.steps.append(text)
        if (self._breaks_at and text == self._breaks_at) or self._seed in self._fail_seeds:
            raise RuntimeError("the environment broke")
        return super().step(text)


class ForgetfulEnv(EchoEnv):
    """Shows something else each time from its second turn on."""

    def step(self, text):
        observation, *rest = super().step(text)
        return (observation + os.urandom(4).hex(), *rest)
