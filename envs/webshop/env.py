"""WebShop for a policy that answers in text, one action a turn."""

import functools
import pathlib
from typing import Any

from envs import answer
from envs.base import TextEnv
from envs.webshop import prompts, splits
from envs.webshop.actions import CLICK, Action, read_answer
from envs.webshop.builtin import Builtin
from envs.webshop.cached_folder import MANIFEST
from envs.webshop.catalogue import Catalogue
from envs.webshop.goal_files import goal_table
from envs.webshop.goals import KINDS, Goal, GoalTable
from envs.webshop.official import find_official_files
from envs.webshop.reward import purchase_reward
from envs.webshop.session import PRODUCTS_PER_PAGE, Session


class WebShopEnv(TextEnv):
    """One purchase an episode.

    A turn is rewarded with 0, with the score of the purchase that it makes (`reward.purchase_reward`, in [0, 1]), or
    with `format_penalty` if it names no action that the page admits (`actions.read_answer`); then the page stays. So a
    turn's reward lies within [format_penalty, 1], and an episode's return is at most 1. Buying ends the episode as
    terminated; the limit of turns as truncated.

    `info`: success (the score is 1), score, num_turns, invalid_action (the penalty was charged), page (which kind is
    shown). After buying also asin, options and the parts of the score. At reset also goal: asin, attributes, options,
    price_limit and weight.

    Args:
      catalogue: "builtin" for the small one of this package, or a folder: of a built catalogue, or with the official
        files under their names; or a catalogue that is open. Opened once a process; that of large files has to be built
        before, by `envs.webshop.build`.
      num_products: how many products the built-in catalogue has, or how many records of the official files are read;
        None for what is usual, or all.
      goals: "synthetic" (made from products and their options) or "human" (sentences that people wrote).
      split: which goals, see `splits`.
      eval_fraction: share of products whose goals the split `train` never gives.
      sampling: how the split `train` draws, see `splits.Split`.
      price_seed: of prices and price limits, see `goals.GoalTable`.
      observation: "text" or "text_rich", as the original shows pages.
      fair_options: whether options are compared in a way that lets every synthetic goal be met, see
        `reward.matched_options`; the original does not.
      show_attributes: whether items have a page with the attributes that the reward compares.
      products_per_page: of results; the original's is 10.
      max_turns: responses of an episode.
      format_penalty: reward of a turn that is not valid, at most 0.
      prompt: "full", or "compact" for tiny models, see `prompts`. There products of a page of results can also be
        clicked by their number.
      thinking: whether responses hold `<think>…</think>` before `<answer>…</answer>`.

    Raises:
      ValueError: an argument out of range, by name, or a catalogue that cannot be read.
    """

    def __init__(
        self,
        catalogue: str | Catalogue = "builtin",
        num_products: int | None = None,
        goals: str = "synthetic",
        split: str = "train",
        eval_fraction: float = 0.2,
        sampling: str = "product",
        price_seed: int = 0,
        observation: str = "text",
        fair_options: bool = False,
        show_attributes: bool = False,
        products_per_page: int = PRODUCTS_PER_PAGE,
        max_turns: int = 15,
        format_penalty: float = -0.1,
        prompt: str = "full",
        thinking: bool = True,
    ):
        for name, value, known in (
            ("goals", goals, KINDS),
            ("observation", observation, prompts.OBSERVATIONS),
            ("prompt", prompt, prompts.STYLES),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")
        counts = {"products_per_page": products_per_page, "max_turns": max_turns}
        if isinstance(price_seed, bool) or not isinstance(price_seed, int):
            raise ValueError(f"price_seed must be a whole number, got {price_seed!r}")
        if num_products is not None:
            counts["num_products"] = num_products
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not -float("inf") < format_penalty <= 0:
            raise ValueError(f"format_penalty must be finite and at most 0, got {format_penalty!r}")
        splits.check(split, eval_fraction, sampling)
        self._shop = _opened(catalogue, num_products) if isinstance(catalogue, str) else catalogue
        self._table = _goal_table(self._shop, goals, price_seed)
        self._split = _split(self._table, split, eval_fraction, sampling)
        self._fair_options, self._show_attributes = bool(fair_options), bool(show_attributes)
        self._products_per_page, self._max_turns = products_per_page, max_turns
        self._format_penalty, self._thinking = float(format_penalty), bool(thinking)
        self._observation, self._prompt = observation, prompt
        self.instructions = prompts.instructions(
            prompt, observation=observation, max_turns=max_turns, thinking=self._thinking
        )
        self._goal: Goal | None = None
        self._num_turns = 0

    @property
    def session(self) -> Session:
        """The visit now."""
        self._check_reset()
        return self._session

    @property
    def goal(self) -> Goal:
        """What is asked for now."""
        self._check_reset()
        return self._goal

    @property
    def num_goals(self) -> int:
        """How many goals the split has."""
        return len(self._split)

    @property
    def thinking(self) -> bool:
        """Whether responses hold a thinking block."""
        return self._thinking

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """The search page of the seed's goal; see `TextEnv.reset`."""
        self._goal = self._table.goal(*self._split.place(seed))
        self._session = Session(
            self._shop,
            self._goal.instruction,
            show_attributes=self._show_attributes,
            per_page=self._products_per_page,
        )
        self._num_turns = 0
        goal = self._goal
        asked = {"asin": goal.target.asin, "attributes": list(goal.attributes), "price_limit": goal.price_limit}
        asked["options"] = dict(goal.options) if isinstance(goal.options, dict) else list(goal.options)
        asked["weight"] = goal.weight
        return self._turn(invalid=False), self._info(0.0, invalid=False) | {"goal": asked}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The page to which the response's action leads; see `TextEnv.step`."""
        self._check_reset()
        invalid = not self._session.apply(self.read_action(text))
        self._num_turns += 1
        score, parts = 0.0, {}
        if self._session.bought and not invalid:
            score, parts = self._buy()
        reward = self._format_penalty if invalid else score
        terminated = self._session.bought
        truncated = not terminated and self._num_turns >= self._max_turns
        return self._turn(invalid), reward, terminated, truncated, self._info(score, invalid) | parts

    def read_action(self, text: str) -> Action | None:
        """The action that a response names, None for one that the page does not admit."""
        inside = answer.find_answer(text, thinking=self._thinking)
        numbers = self._numbers()
        action = read_answer(inside, {*self.session.clickables, *numbers})
        if action is not None and action.name == CLICK:
            return Action(CLICK, numbers.get(action.argument, action.argument))
        return action

    def write_response(self, action: Action, thought: str = "") -> str:
        """The response in whose place `read_action` reads an action; products by number in the compact style."""
        if action.name == CLICK:
            numbers = {asin: number for number, asin in self._numbers().items()}
            action = Action(CLICK, numbers.get(action.argument, action.argument))
        think = f"<think>{thought}</think>" if self._thinking else ""
        return f"{think}<answer>{action}</answer>"

    def _numbers(self) -> dict[str, str]:
        return prompts.numbered_products(self.session) if self._prompt == "compact" else {}

    def _buy(self) -> tuple[float, dict[str, Any]]:
        session = self._session
        bought, price = session.shown_product(), float(self._table.numbers.prices[session.product])
        score, parts = purchase_reward(bought, session.options, price, self._goal, fair_options=self._fair_options)
        session.show_purchase(score)
        return score, {"asin": bought.asin, "options": dict(session.options), **parts}

    def _turn(self, invalid: bool) -> str:
        return prompts.turn(
            self._prompt,
            self._session,
            instruction=self._goal.instruction,
            observation=self._observation,
            number=self._num_turns + 1,
            max_turns=self._max_turns,
            invalid=invalid,
            thinking=self._thinking,
        )

    def _info(self, score: float, invalid: bool) -> dict[str, Any]:
        return {
            "success": score == 1.0,
            "score": score,
            "num_turns": self._num_turns,
            "invalid_action": invalid,
            "page": self._session.place,
        }

    def _check_reset(self) -> None:
        if self._goal is None:
            raise RuntimeError("reset the environment first")


@functools.lru_cache(maxsize=4)
def _opened(catalogue: str, num_products: int | None) -> Catalogue:
    if catalogue == "builtin":
        return Catalogue.open(Builtin() if num_products is None else Builtin(num_products))
    if (pathlib.Path(catalogue) / MANIFEST).exists():
        if num_products is not None:
            raise ValueError(f"num_products={num_products} with catalogue={catalogue!r}, which is built; allowed: None")
        return Catalogue(catalogue)
    files = find_official_files(pathlib.Path(catalogue), num_products)
    # A worker that builds it would be taken for hung, and its successor would begin anew.
    if files.is_large and not Catalogue.is_built(files):
        count = "" if num_products is None else f" --num_products={num_products}"
        raise ValueError(
            f"catalogue={catalogue!r} is not built, which takes minutes; once: "
            f"python -m envs.webshop.build {catalogue}{count}"
        )
    return Catalogue.open(files)


@functools.lru_cache(maxsize=8)
def _goal_table(catalogue: Catalogue, goals: str, price_seed: int) -> GoalTable:
    return goal_table(catalogue, goals, price_seed)


@functools.lru_cache(maxsize=16)
def _split(table: GoalTable, split: str, eval_fraction: float, sampling: str) -> splits.Split:
    return splits.Split(table, split, eval_fraction, sampling)
