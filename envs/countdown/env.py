"""Countdown: reach a target with the given numbers, in one answer."""

from typing import Any

from envs.answer import find_answer
from envs.base import TextEnv
from envs.countdown import expression
from envs.countdown.problems import Problem, ProblemSettings, problem_of
from envs.single_turn import check_arguments, response_form


class CountdownEnv(TextEnv):
    """Write an expression of all the numbers, each exactly once, whose value is the target.

    Reward: 1 for such an expression; `format_reward` for any other expression (wrong value, wrong numbers, division by
    zero); `format_penalty` for a response without an answer in the response format, or whose answer is no expression
    (see `expression`). So it is one of these three. Values are exact fractions. Whatever the response, the episode has
    then ended as terminated.

    `info`: success, numbers_right (each given number exactly once), invalid_action (the penalty was charged).

    Args:
      min_numbers, max_numbers: how many numbers a problem has.
      max_number: numbers are 1 to this.
      max_target: targets are 1 to this.
      split: "train" (never an evaluation problem), "eval", or "seed"; see `problems`.
      num_eval_problems: how many problems are held out.
      format_reward: of an expression that does not solve the problem, in [0, 1).
      format_penalty: at most 0.
      prompt: "full" (instructions and labels) or "compact" (the numbers, and the target below them).
      thinking: whether responses hold `<think>…</think>` before `<answer>…</answer>`.

    Raises:
      ValueError: an argument out of range, by name.
    """

    def __init__(
        self,
        min_numbers: int = 3,
        max_numbers: int = 4,
        max_number: int = 99,
        max_target: int = 99,
        split: str = "train",
        num_eval_problems: int = 256,
        format_reward: float = 0.1,
        format_penalty: float = -0.1,
        prompt: str = "full",
        thinking: bool = True,
    ):
        check_arguments(split=split, prompt=prompt, format_penalty=format_penalty)
        if isinstance(num_eval_problems, bool) or not isinstance(num_eval_problems, int) or num_eval_problems < 1:
            raise ValueError(f"num_eval_problems must be a whole number of at least 1, got {num_eval_problems!r}")
        if not 0 <= format_reward < 1:
            raise ValueError(f"format_reward must be in [0, 1), got {format_reward!r}")
        self._settings = ProblemSettings(min_numbers, max_numbers, max_number, max_target)
        self._split, self._num_eval_problems = split, num_eval_problems
        self._format_reward, self._format_penalty = float(format_reward), float(format_penalty)
        self._prompt, self._thinking = prompt, bool(thinking)
        self._problem: Problem | None = None
        self.instructions = "" if prompt == "compact" else self._instructions()

    @property
    def problem(self) -> Problem:
        """The problem of the episode."""
        if self._problem is None:
            raise RuntimeError("reset the environment first")
        return self._problem

    @property
    def thinking(self) -> bool:
        """Whether a response must hold a thinking block."""
        return self._thinking

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begins the episode of a seed; see `TextEnv.reset`."""
        self._problem = problem_of(self._settings, self._split, seed, self._num_eval_problems)
        numbers, target = " ".join(map(str, self._problem.numbers)), self._problem.target
        info = {"success": False, "numbers_right": False, "invalid_action": False}
        if self._prompt == "compact":
            return f"{numbers}\n{target}", info
        form = response_form("...", thinking=self._thinking)
        return f"Numbers: {numbers}\nTarget: {target}\nReply as {form}.", info

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes the answer and ends the episode; see `TextEnv.step`."""
        inside = find_answer(text, thinking=self._thinking)
        postfix = None if inside is None else expression.parse(inside)
        # Only numbers that were given are ever valued, so no text makes a large one.
        given = sorted(map(str, self.problem.numbers))
        numbers_right = postfix is not None and sorted(expression.numbers_of(postfix)) == given
        value = expression.value_of(postfix) if numbers_right else None
        success = value == self.problem.target
        info = {"success": success, "numbers_right": numbers_right, "invalid_action": postfix is None}
        if postfix is None:
            return self._after("That is no expression.", "-"), self._format_penalty, True, False, info
        reward = 1.0 if success else self._format_reward
        if not numbers_right:
            return self._after("That does not use each number exactly once.", "?"), reward, True, False, info
        shown = "nothing" if value is None else str(value)
        return self._after(f"That is {shown}.", shown), reward, True, False, info

    def _after(self, full: str, compact: str) -> str:
        return compact if self._prompt == "compact" else full

    def _instructions(self) -> str:
        return (
            "You are given some numbers and a target. Write an arithmetic expression that uses each number exactly "
            "once and has the target as its value. Allowed are +, -, *, / and brackets; no other number, no sign "
            "before a number, no equals sign.\n"
            f"Rewards: 1 for a right expression, {self._format_reward:g} for any other expression, "
            f"{self._format_penalty:g} for an answer that is none.\n"
            f"Reply in exactly this form: {response_form('(3 + 4) * 2', thinking=self._thinking)}"
        )
