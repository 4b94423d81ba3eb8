"""Countdown problems: made from an expression, so that each can be solved; evaluation problems kept apart by content.

A problem is its numbers in any order and its target. The evaluation problems are a fixed set, and a training seed
whose problem equals one of them moves on to its next attempt.

| split | problem of a seed |
|---|---|
| `train` | never an evaluation problem |
| `eval` | evaluation problem number seed mod num_eval_problems |
| `seed` | the plain problem of the seed; no promise |
"""

import dataclasses
import functools
import random
from collections.abc import Callable
from fractions import Fraction

from envs.countdown.expression import combine
from envs.draws import choose, draws_for

_ATTEMPTS = 2000
# How many seeds are tried for one more distinct evaluation problem; past this the family is taken to have no more,
# and a problem is repeated.
_DISTINCT_TRIES = 100


class NoProblemError(ValueError):
    """No problem meets the settings."""


@dataclasses.dataclass(frozen=True)
class ProblemSettings:
    """A family of problems.

    Attributes:
      min_numbers, max_numbers: how many numbers, at least and at most.
      max_number: numbers are 1 to this.
      max_target: targets are 1 to this.
    """

    min_numbers: int
    max_numbers: int
    max_number: int
    max_target: int

    def __post_init__(self):
        limits = {"min_numbers": (2, 8), "max_numbers": (self.min_numbers, 8), "max_number": (1, 10**6)}
        for name, (low, high) in (limits | {"max_target": (1, 10**9)}).items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Numbers, a target, and an expression that solves it.

    Attributes:
      numbers: in the order shown.
      target: what to reach.
      solution: an expression of each number exactly once whose value is the target.
      steps: its operations in order, as "3+4=7".
    """

    numbers: tuple[int, ...]
    target: int
    solution: str
    steps: tuple[str, ...]

    @property
    def content(self) -> tuple[tuple[int, ...], int]:
        """What makes two problems the same."""
        return tuple(sorted(self.numbers)), self.target


def random_expression(draws: random.Random, numbers: tuple[int, ...]) -> tuple[int, str, list[str]]:
    """(value, expression, steps) of a random tree over the numbers whose every value is a whole number above 0."""
    parts = [(number, str(number)) for number in numbers]
    steps = []
    while len(parts) > 1:
        left, left_text = parts.pop(int(draws.random() * len(parts)))
        right, right_text = parts.pop(int(draws.random() * len(parts)))
        allowed = ["+", "*", *(["-"] if left > right else []), *(["/"] if left % right == 0 else [])]
        operator = choose(draws, allowed)
        value = int(combine(operator, Fraction(left), Fraction(right)))
        steps.append(f"{left}{operator}{right}={value}")
        parts.append((value, f"({left_text}{operator}{right_text})"))
    value, text = parts[0]
    return value, text[1:-1], steps


def generate(
    settings: ProblemSettings, stream: str, seed: int, accept: Callable[[Problem], bool] = lambda problem: True
) -> Problem:
    """The first problem of a seed that is accepted; a function of the arguments alone.

    Raises:
      NoProblemError: none was found.
    """
    for attempt in range(_ATTEMPTS):
        draws = draws_for("countdown", stream, seed, attempt)
        count = settings.min_numbers + int(draws.random() * (settings.max_numbers - settings.min_numbers + 1))
        numbers = tuple(1 + int(draws.random() * settings.max_number) for _ in range(count))
        target, solution, steps = random_expression(draws, numbers)
        if target <= settings.max_target:
            problem = Problem(numbers, target, solution, tuple(steps))
            if accept(problem):
                return problem
    raise NoProblemError(f"no countdown problem of {settings} for seed {seed} in {_ATTEMPTS} attempts; allow more")


@functools.lru_cache(maxsize=16)
def evaluation_problems(settings: ProblemSettings, num_eval_problems: int) -> tuple[Problem, ...]:
    """The evaluation problems of a family, distinct as long as it has enough; a smaller set begins a larger one."""
    problems, seen, seed = [], set(), 0
    while len(problems) < num_eval_problems:
        for _ in range(_DISTINCT_TRIES):
            problem = generate(settings, "eval", seed)
            seed += 1
            if problem.content not in seen:
                break
        seen.add(problem.content)
        problems.append(problem)
    return tuple(problems)


@functools.lru_cache(maxsize=16)
def _held_out(settings: ProblemSettings, num_eval_problems: int) -> frozenset:
    return frozenset(problem.content for problem in evaluation_problems(settings, num_eval_problems))


def problem_of(settings: ProblemSettings, split: str, seed: int, num_eval_problems: int) -> Problem:
    """The problem of a seed.

    Raises:
      NoProblemError: no problem meets the settings, or, for `train`, the evaluation set holds all that do.
    """
    if split == "eval":
        return evaluation_problems(settings, num_eval_problems)[seed % num_eval_problems]
    if split == "seed":
        return generate(settings, "seed", seed)
    held_out = _held_out(settings, num_eval_problems)
    try:
        return generate(settings, "train", seed, lambda problem: problem.content not in held_out)
    except NoProblemError as error:
        raise NoProblemError(f"{error}, or hold out fewer (num_eval_problems={num_eval_problems})") from error
