"""Tiny environments that a tiny model learns in a minute: for tests and first steps."""

import abc
import random
from typing import Any

from envs.base import TextEnv


class _SymbolEnv(TextEnv):
    """Shows one symbol a turn and rewards the response to it; success when every turn got the full reward."""

    def __init__(self, alphabet: str, num_turns: int):
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise ValueError(f"alphabet must hold distinct symbols, got {alphabet!r}")
        if isinstance(num_turns, bool) or not isinstance(num_turns, int) or num_turns < 1:
            raise ValueError(f"num_turns must be a whole number of at least 1, got {num_turns!r}")
        self._alphabet, self._num_turns = alphabet, num_turns
        self._symbols: list[str] = []
        self._turn = self._num_right = 0

    @abc.abstractmethod
    def _reward(self, symbol: str, text: str) -> float:
        """What a response to the symbol earns."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        draws = random.Random(seed)
        # One symbol more than turns: what the observation after the last turn shows.
        self._symbols = [self._alphabet[int(draws.random() * len(self._alphabet))] for _ in range(self._num_turns + 1)]
        self._turn = self._num_right = 0
        return self._symbols[0], {"success": False}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reward = self._reward(self._symbols[self._turn], text)
        self._turn += 1
        self._num_right += reward == 1.0
        terminated = self._turn == self._num_turns
        info = {"success": self._num_right == self._num_turns, "num_right": self._num_right}
        return self._symbols[self._turn], reward, terminated, False, info


class EchoEnv(_SymbolEnv):
    """Say the symbol that is shown.

    Reward of a turn: 1 for the symbol alone (blanks around it do not matter), `partial` for a response that
    holds it among other text, else 0.

    Args:
      alphabet: the symbols.
      num_turns: of an episode.
      partial: in [0, 1).
    """

    def __init__(self, alphabet: str = "ABCD", num_turns: int = 3, partial: float = 0.2):
        super().__init__(alphabet, num_turns)
        if not 0 <= partial < 1:
            raise ValueError(f"partial must be in [0, 1), got {partial!r}")
        self._partial = partial

    def _reward(self, symbol: str, text: str) -> float:
        if text.strip() == symbol:
            return 1.0
        return self._partial if symbol in text else 0.0


class ParityEnv(_SymbolEnv):
    """Answer 0 with a character of even code, 1 with one of odd code. Guessing gives about one half.

    Reward of a turn: 1 when the first character of the response (blanks passed over) has the parity shown,
    else 0, also for an empty response. Any tokenizer and an untrained model earn something from the first
    step on.

    Args:
      num_turns: of an episode.
    """

    def __init__(self, num_turns: int = 3):
        super().__init__("01", num_turns)

    def _reward(self, symbol: str, text: str) -> float:
        text = text.strip()
        return float(bool(text) and ord(text[0]) % 2 == int(symbol))
