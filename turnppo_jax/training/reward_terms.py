"""Process rewards: what the learner trains on is a weighted sum of terms, each a number for each turn.

    r_k = Σ_name weight_name · term_name,k

The environment's reward is one of the terms, and by default the only one. An environment may say terms of its own in
`info["reward_terms"]` of its turns (name -> number); they are weighted by the same names. Success, score and return of
an episode stay the environment's.
"""

import dataclasses
import difflib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from turnppo_jax.types import Trajectory

# The weighted sum goes by this name among the terms.
TOTAL = "total"
# Of DAPO's 20,480 tokens the last 4,096 are its buffer.
_BUFFER_SHARE = 5


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """`config.reward`.

    Attributes:
      terms: weight by name: of `TERMS`, or of what the environment says. A weight of 0 only logs the term.
      repeated_ngram: n of the `repeated_tokens` term.
      overlong_limit: L_max of the `overlong` term in tokens; 0 means `rollout.max_turn_tokens`.
      overlong_buffer: L_cache of the `overlong` term in tokens; 0 means a fifth of the limit, as in DAPO.
    """

    terms: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"environment": 1.0})
    repeated_ngram: int = 4
    overlong_limit: int = 0
    overlong_buffer: int = 0

    def __post_init__(self):
        for name, weight in self.terms.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ValueError(f"reward.terms.{name}={weight!r}; allowed: a finite number")
        if TOTAL in self.terms:
            raise ValueError(f"reward.terms.{TOTAL} is the sum of the others; known: {', '.join(TERMS)}")
        for name, least in (("repeated_ngram", 1), ("overlong_limit", 0), ("overlong_buffer", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"reward.{name}={getattr(self, name)}; allowed: at least {least}")

    def resolved(self, max_turn_tokens: int) -> "RewardSettings":
        """The same with limit and buffer as numbers of tokens.

        Raises:
          ValueError: a limit that no response can pass, or a buffer longer than the limit.
        """
        limit = self.overlong_limit or max_turn_tokens
        if limit > max_turn_tokens:
            raise ValueError(
                f"reward.overlong_limit={limit}; allowed: at most rollout.max_turn_tokens={max_turn_tokens}"
            )
        buffer = self.overlong_buffer or max(1, limit // _BUFFER_SHARE)
        if buffer > limit:
            raise ValueError(f"reward.overlong_buffer={buffer}; allowed: at most the limit, {limit}")
        return dataclasses.replace(self, overlong_limit=limit, overlong_buffer=buffer)

    def notes(self) -> list[str]:
        """One line for each term that the environment has to say: whether it does, the first step's turns tell."""
        lines = []
        for name in self.terms:
            if name not in TERMS:
                near = difflib.get_close_matches(name, TERMS, n=1)
                lines.append(
                    f"reward.terms.{name} is none of {', '.join(TERMS)}: the first step refuses it unless the "
                    f'environment says it in info["reward_terms"]{f"; did you mean {near[0]!r}?" if near else ""}'
                )
        return lines


def environment(trajectory: Trajectory, settings: RewardSettings) -> list[float]:
    """The environment's reward, its penalties included."""
    return [turn.reward for turn in trajectory.turns]


def invalid_action(trajectory: Trajectory, settings: RewardSettings) -> list[float]:
    """1 where the environment says `info["invalid_action"]`."""
    return [float(bool(turn.info.get("invalid_action", False))) for turn in trajectory.turns]


def repeated_observation(trajectory: Trajectory, settings: RewardSettings) -> list[float]:
    """1 for a turn that changes nothing.

    The environment may say so in `info["effective"]` (text that counts turns or actions never repeats). Where it does
    not, a turn changes nothing when the text shown after it is the very text that it answered; one that ends the task
    does change something.
    """
    last = None if trajectory.terminated else trajectory.final_observation
    shown = [*(turn.observation for turn in trajectory.turns), last]
    return [
        float(not turn.info.get("effective", before != after))
        for turn, (before, after) in zip(trajectory.turns, itertools.pairwise(shown), strict=True)
    ]


def repeated_tokens(trajectory: Trajectory, settings: RewardSettings) -> list[float]:
    """Share of the response's n-grams that stood in it before: 1 − distinct / all; 0 for fewer than n tokens."""
    return [_repeated_share(turn.response_ids, settings.repeated_ngram) for turn in trajectory.turns]


def response_tokens(trajectory: Trajectory, settings: RewardSettings) -> list[float]:
    """Sampled tokens of the turn."""
    return [float(len(turn.response_ids)) for turn in trajectory.turns]


def overlong(trajectory: Trajectory, settings: RewardSettings) -> list[float]:
    """DAPO's soft over-long punishment (arXiv 2503.14476, equation 13) of each response y.

        0                              |y| ≤ L_max − L_cache
        (L_max − L_cache − |y|) / L_cache    up to L_max
        −1                             |y| > L_max

    Negative by itself: its weight is positive.
    """
    limit, buffer = settings.overlong_limit, settings.overlong_buffer
    excess = (len(turn.response_ids) - (limit - buffer) for turn in trajectory.turns)
    return [-min(max(tokens / buffer, 0.0), 1.0) for tokens in excess]


def success(trajectory: Trajectory, settings: RewardSettings) -> list[float]:
    """1 for the last turn of an episode that the environment calls a success."""
    return [0.0] * (len(trajectory.turns) - 1) + [float(trajectory.success)] * bool(trajectory.turns)


# Name -> function(trajectory, settings) -> K numbers. A name here wins over the same name of an environment.
TERMS: dict[str, Callable[[Trajectory, RewardSettings], Sequence[float]]] = {
    "environment": environment,
    "invalid_action": invalid_action,
    "overlong": overlong,
    "repeated_observation": repeated_observation,
    "repeated_tokens": repeated_tokens,
    "response_tokens": response_tokens,
    "success": success,
}


@dataclasses.dataclass(frozen=True)
class Rewarded:
    """Trajectories with the reward that is trained on.

    Attributes:
      trajectories: in the order given; only `reward` of their turns is another.
      terms: of each turn of each trajectory: the terms, unweighted, and the weighted sum as "total".
      metrics: `reward/<term>_mean` and `reward/total_mean`, means over turns.
    """

    trajectories: list[Trajectory]
    terms: list[list[dict[str, float]]]
    metrics: dict[str, float]


def turn_terms(trajectory: Trajectory, settings: RewardSettings) -> dict[str, np.ndarray]:
    """[K] float64 of each term of the settings, and the weighted sum as "total".

    Raises:
      ValueError: the environment says something else than finite numbers.
    """
    table = {}
    for name in settings.terms:
        known = TERMS[name](trajectory, settings) if name in TERMS else _said(trajectory, name)
        table[name] = np.asarray(known, np.float64)
    total = np.zeros(len(trajectory.turns))
    for name, weight in settings.terms.items():
        if weight:
            total = total + weight * table[name]
    return table | {TOTAL: total}


def turn_rewards(trajectory: Trajectory, settings: RewardSettings) -> np.ndarray:
    """[K] float64, what the learner trains on."""
    return turn_terms(trajectory, settings)[TOTAL]


def apply_terms(trajectories: Sequence[Trajectory], settings: RewardSettings) -> Rewarded:
    """The trajectories of a step with the weighted sum as reward; the given ones are left as they are.

    Raises:
      ValueError: a term that is neither known nor said by the environment in any turn, or no finite number.
    """
    _check_names(trajectories, settings)
    tables = [turn_terms(trajectory, settings) for trajectory in trajectories]
    rewarded = [
        dataclasses.replace(
            trajectory,
            turns=[
                dataclasses.replace(turn, reward=float(reward))
                for turn, reward in zip(trajectory.turns, table[TOTAL], strict=True)
            ],
        )
        for trajectory, table in zip(trajectories, tables, strict=True)
    ]
    terms = [
        [{name: float(column[k]) for name, column in table.items()} for k in range(len(trajectory.turns))]
        for trajectory, table in zip(trajectories, tables, strict=True)
    ]
    turns = [turn for of_trajectory in terms for turn in of_trajectory]
    metrics = {
        f"reward/{name}_mean": float(np.mean([turn[name] for turn in turns])) if turns else 0.0
        for name in (*settings.terms, TOTAL)
    }
    return Rewarded(rewarded, terms, metrics)


def _said(trajectory: Trajectory, name: str) -> list[float]:
    """What the environment says of each turn; 0 where it says nothing."""
    values = [_of_environment(turn.info).get(name, 0.0) for turn in trajectory.turns]
    for number, value in enumerate(values):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(
                f'info["reward_terms"][{name!r}]={value!r} in turn {number} of an episode with seed {trajectory.seed}; '
                "allowed: a finite number"
            )
    return values


def _check_names(trajectories: Sequence[Trajectory], settings: RewardSettings) -> None:
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    said = {name for turn in turns for name in _of_environment(turn.info)}
    for name in settings.terms:
        if turns and name not in TERMS and name not in said:
            raise ValueError(
                f"reward.terms.{name} is unknown; known: {', '.join(TERMS)}; said by this environment: "
                f"{', '.join(sorted(said)) or 'none'}"
            )


def _of_environment(info: Mapping) -> Mapping:
    said = info.get("reward_terms") or {}
    if not isinstance(said, Mapping):
        raise ValueError(f'info["reward_terms"]={said!r}; allowed: a dict from name to number')
    return said


def _repeated_share(ids: np.ndarray, n: int) -> float:
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
