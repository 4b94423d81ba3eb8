"""What the shopper is asked for: the goals of a catalogue, with price limits from a seed, in the original's order.

Human goals are sentences that people wrote for a product. Synthetic goals are a product's own instruction with every
combination of its options. Goals are kept as a table of numbers, one row a product or sentence, and made when asked
for: a large catalogue has millions of combinations.
"""

import bisect
import collections
import dataclasses
import math
import random
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from envs.webshop.product import Product

KINDS = ("synthetic", "human")
NO_LIMIT = 1_000_000.0

# Limits are the multiples of ten dollars below a thousand; of the first four above the price two are drawn.
_LIMITS = [10.0 * tens for tens in range(1, 100)]
_NUM_LIMITS = 4
# The original orders goals by a shuffle of this seed, whatever the prices.
_ORDER_SEED = 233


class Products(Protocol):
    """What goals need of a catalogue."""

    def __len__(self) -> int:
        """How many products there are."""

    def product(self, index: int) -> Product:
        """The product of an index."""


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """What is to be bought.

    Attributes:
      product: index of the product that the goal was made from.
      target: that product.
      instruction: the text that the shopper reads.
      attributes: what the product must be, at least one.
      options: what must be chosen: name -> value for a synthetic goal, values for a human one.
      price_limit: dollars; `NO_LIMIT` where the text names none.
      weight: with which the original draws the goal.
    """

    product: int
    target: Product
    instruction: str
    attributes: tuple[str, ...]
    options: Mapping[str, str] | tuple[str, ...]
    price_limit: float
    weight: float


@dataclasses.dataclass(frozen=True)
class GoalNumbers:
    """All goals of a catalogue of `N` products as `R` rows; a row is a product with an instruction, or one sentence.

    Attributes:
      prices: [N] float64, dollars, of every product.
      rows: [R] int64, the product of each row.
      asins: [R] text, of those products.
      sentences: [R] int64, which of its product's human instructions a row is; 0 for synthetic goals.
      counts: [R] int64, goals of the row: its combinations of options; 1 for a sentence.
      limits: [R] float64, dollars.
      weights: [R] float64, with which the original draws each goal of the row.
    """

    prices: np.ndarray
    rows: np.ndarray
    asins: np.ndarray
    sentences: np.ndarray
    counts: np.ndarray
    limits: np.ndarray
    weights: np.ndarray


def draw_goals(products: Products, kind: str, price_seed: int) -> GoalNumbers:
    """The goals of a catalogue; reads every product once.

    Args:
      products: the catalogue.
      kind: "synthetic" or "human".
      price_seed: of the prices of products that have a range, and of the limits. 0 gives what the original gives
        after `random.seed(0)`.

    Raises:
      ValueError: an unknown kind, or a catalogue without goals of that kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown goals {kind!r}; known: {', '.join(KINDS)}")
    draws = random.Random(price_seed)
    prices = np.empty(len(products))
    rows, asins, sentences, counts, attributes = [], [], [], [], []
    for index in range(len(products)):
        product = products.product(index)
        ends = product.prices
        prices[index] = draws.uniform(*ends) if len(ends) > 1 else ends[0]
        for sentence, count, wanted in _rows_of(product, kind):
            rows.append(index)
            asins.append(product.asin)
            sentences.append(sentence)
            counts.append(count)
            attributes.append(wanted)
    # All prices are drawn before the first limit, as in the original, and a limit also for a product that has an
    # option without values, so no combination.
    limits = np.array([_draw_limit(draws, prices[index]) for index in rows])
    weights = _weights(kind, attributes, counts)
    kept = np.flatnonzero(counts)
    if not len(kept):
        raise ValueError(f"goals={kind!r}: the catalogue of {len(products)} products has none")
    return GoalNumbers(
        prices,
        np.array(rows, np.int64)[kept],
        np.array(asins)[kept],
        np.array(sentences, np.int64)[kept],
        np.array(counts, np.int64)[kept],
        limits[kept],
        weights[kept],
    )


class GoalTable:
    """The goals of a catalogue, each made when it is asked for.

    Args:
      products: the catalogue.
      kind: "synthetic" or "human".
      price_seed: see `draw_goals`.
      numbers: what `draw_goals` gives for these arguments, where that is at hand.

    Attributes:
      numbers: of the goals.

    Raises:
      ValueError: as `draw_goals`.
    """

    def __init__(
        self, products: Products, kind: str = "synthetic", price_seed: int = 0, numbers: GoalNumbers | None = None
    ):
        self._products, self._kind = products, kind
        self.numbers = draw_goals(products, kind, price_seed) if numbers is None else numbers
        self._first = np.concatenate([[0], np.cumsum(self.numbers.counts)])
        self._order: np.ndarray | None = None

    def __len__(self) -> int:
        return int(self._first[-1])

    def place(self, index: int) -> tuple[int, int]:
        """Row, and number in it, of the goal that stands at an index in the original's order.

        Args:
          index: in [0, len).
        """
        if self._order is None:  # made at the first use: only splits by index need it
            order = list(range(len(self)))
            random.Random(_ORDER_SEED).shuffle(order)
            self._order = np.array(order, np.int64)
        number = int(self._order[index])
        row = int(np.searchsorted(self._first, number, "right")) - 1
        return row, number - int(self._first[row])

    def goal(self, row: int, number: int) -> Goal:
        """Goal `number` of a row.

        Args:
          row: in [0, R).
          number: in [0, numbers.counts[row]).
        """
        index = int(self.numbers.rows[row])
        target = self._products.product(index)
        limit = float(self.numbers.limits[row])
        if self._kind == "human":
            human = target.human_instructions[int(self.numbers.sentences[row])]
            text, attributes, options = human.instruction.strip("."), human.attributes, human.options
        else:
            options = _combination(target.options, number)
            named = ", and ".join(f"{name}: {value}" for name, value in options.items())
            text = target.instruction + (f" with {named}" if named else "")
            attributes = target.instruction_attributes
        if limit < NO_LIMIT:
            text += f", and price lower than {limit:.2f} dollars"
        return Goal(index, target, text, attributes, options, limit, float(self.numbers.weights[row]))


def _rows_of(product: Product, kind: str):
    """(sentence, goals, attributes) of each row of a product; goals without attributes are none."""
    if kind == "human":
        for sentence, human in enumerate(product.human_instructions):
            if human.attributes:
                yield sentence, 1, human.attributes
    elif product.instruction is not None and product.instruction_attributes:
        yield 0, math.prod(map(len, product.options.values())), product.instruction_attributes


def _draw_limit(draws: random.Random, price: float) -> float:
    first = bisect.bisect_right(_LIMITS, price)
    candidates = _LIMITS[first : first + _NUM_LIMITS]
    return max(draws.sample(candidates, 2)) if len(candidates) >= 2 else NO_LIMIT


def _weights(kind: str, attributes: list[tuple[str, ...]], counts: list[int]) -> np.ndarray:
    """[R] mean over the attributes of a row of 1 / goals that name the attribute; 1 for human goals."""
    if kind == "human":
        return np.ones(len(counts))
    goals = collections.Counter()
    for names, count in zip(attributes, counts, strict=True):
        for name in names:
            goals[name] += count
    weights = []
    for names in attributes:
        total = 0.0
        for name in names:  # term by term: from Python 3.12 on sum() rounds otherwise
            # An attribute of products without combinations alone has no goal; its weight is not used.
            total += 1.0 / (goals[name] or 1)
        weights.append(total / len(names))
    return np.array(weights)


def _combination(options: Mapping[str, tuple[str, ...]], number: int) -> dict[str, str]:
    """Combination `number` of the product of all values, the last of the sorted names running fastest."""
    chosen = {}
    for name in sorted(options, reverse=True):
        number, place = divmod(number, len(options[name]))
        chosen[name] = options[name][place]
    return dict(reversed(chosen.items()))
