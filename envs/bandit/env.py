"""One pull of a two-armed bandit: a small certain reward, or a larger one that seldom comes."""

import functools
import hashlib
import itertools
import math
from typing import Any

from envs.answer import find_answer
from envs.base import TextEnv
from envs.draws import choose, draws_for
from envs.single_turn import check_arguments, response_form

NAMES = (
    *("Anchor", "Beacon", "Comet", "Dragon", "Ember", "Falcon", "Garnet", "Harbor"),
    *("Ivory", "Jasper", "Lantern", "Meadow", "Nebula", "Otter", "Phoenix", "Raven"),
)
_PAIRS = tuple(itertools.combinations(NAMES, 2))
_NUM_EVAL_PAIRS = len(_PAIRS) // 4


@functools.cache
def pairs_of(split: str) -> tuple[tuple[str, str], ...]:
    """The pairs of names of a split: "eval" has a quarter of all, "train" the others, "seed" all."""
    if split == "seed":
        return _PAIRS
    order = sorted(_PAIRS, key=lambda pair: hashlib.blake2b("|".join(pair).encode(), digest_size=16).digest())
    return tuple(order[:_NUM_EVAL_PAIRS] if split == "eval" else order[_NUM_EVAL_PAIRS:])


class BanditEnv(TextEnv):
    """Pull one of two arms, once.

    The low arm always pays `low_reward`; the high arm pays `high_reward` with probability `high_probability`, else 0
    (the numbers are RAGEN's, arXiv 2504.20073). Two names, which of them is which arm, their order and the draw are a
    function of the seed; the observation says in words which arm is steady and which is risky. The policy that always
    pulls the low arm earns .1, the one that always pulls the high arm .25 on average, a blind one .175.

    The reward is `format_penalty` for a response without an answer in the response format, or whose answer is not one
    of the two names (case and blanks around it do not matter); so it is one of format_penalty, 0, low_reward and
    high_reward. Whatever the response, the episode has then ended as terminated.

    `info`: success (the arm with the larger mean was pulled, whatever it paid), arm ("low", "high" or None),
    invalid_action.

    Args:
      low_reward: what the low arm pays.
      high_reward: what the high arm pays when it does.
      high_probability: how often it does.
      hint: whether the observation says which arm is which; without it nothing tells them apart, and no policy earns
        more than a blind one: a control.
      split: "train", "eval" (pairs of names that training never shows) or "seed" (all pairs).
      format_penalty: at most 0.
      prompt: "full" (instructions and sentences) or "compact" (a name and a word a line).
      thinking: whether responses hold `<think>…</think>` before `<answer>…</answer>`.

    Raises:
      ValueError: an argument out of range, by name.
    """

    def __init__(
        self,
        low_reward: float = 0.1,
        high_reward: float = 1.0,
        high_probability: float = 0.25,
        hint: bool = True,
        split: str = "train",
        format_penalty: float = -0.1,
        prompt: str = "full",
        thinking: bool = True,
    ):
        check_arguments(split=split, prompt=prompt, format_penalty=format_penalty)
        for name, value in (("low_reward", low_reward), ("high_reward", high_reward)):
            if not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value!r}")
        if not 0 <= high_probability <= 1:
            raise ValueError(f"high_probability must be in [0, 1], got {high_probability!r}")
        self._pays = {"low": float(low_reward), "high": float(high_reward)}
        self._high_probability, self._format_penalty = high_probability, float(format_penalty)
        self._hint, self._split, self._prompt = bool(hint), split, prompt
        self._thinking = bool(thinking)
        self._arm_of: dict[str, str] = {}  # name -> "low" or "high", in the order shown
        self._high_comes = False
        self.instructions = "" if prompt == "compact" else self._instructions()

    @property
    def arm_of(self) -> dict[str, str]:
        """Name to "low" or "high", in the order shown."""
        return dict(self._arm_of)

    @property
    def best_arm(self) -> str:
        """The arm with the larger mean."""
        return "high" if self._high_probability * self._pays["high"] >= self._pays["low"] else "low"

    @property
    def thinking(self) -> bool:
        """Whether a response must hold a thinking block."""
        return self._thinking

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begins the episode of a seed; see `TextEnv.reset`."""
        draws = draws_for("bandit", self._split, seed)
        pair = choose(draws, pairs_of(self._split))
        low, high = pair if draws.random() < 0.5 else pair[::-1]
        shown = [(low, "low"), (high, "high")]
        self._arm_of = dict(shown if draws.random() < 0.5 else shown[::-1])
        self._high_comes = draws.random() < self._high_probability
        return self._observation(), {"success": False, "arm": None, "invalid_action": False}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes the answer and ends the episode; see `TextEnv.step`."""
        inside = find_answer(text, thinking=self._thinking)
        asked = "" if inside is None else inside.strip().lower()
        name = next((name for name in self._arm_of if name.lower() == asked), None)
        if name is None:
            after = "-" if self._prompt == "compact" else "That named neither arm."
            return after, self._format_penalty, True, False, {"success": False, "arm": None, "invalid_action": True}
        arm = self._arm_of[name]
        reward = self._pays[arm] if arm == "low" or self._high_comes else 0.0
        after = f"{name} {reward:g}" if self._prompt == "compact" else f"You pulled {name}. It paid {reward:g}."
        return after, reward, True, False, {"success": arm == self.best_arm, "arm": arm, "invalid_action": False}

    def _instructions(self) -> str:
        low, high = self._pays["low"], self._pays["high"]
        return (
            "You stand before two arms and pull one of them, once.\n"
            f"A steady arm always pays {low:g}. A risky arm pays {high:g} with probability "
            f"{self._high_probability:g}, else nothing. Choose the arm that pays more on average.\n"
            f"Reply in exactly this form: {response_form('NAME', thinking=self._thinking)}"
        )

    def _observation(self) -> str:
        words = {"low": "steady", "high": "risky"}
        if self._prompt == "compact":
            return "\n".join(f"{name} {words[arm]}" if self._hint else name for name, arm in self._arm_of.items())
        lines = [f"The arms are {' and '.join(self._arm_of)}."]
        if self._hint:
            lines += [f"{name} is the {words[arm]} one." for name, arm in self._arm_of.items()]
        return "\n".join([*lines, f"Which one do you pull? Reply as {response_form('...', thinking=self._thinking)}."])
