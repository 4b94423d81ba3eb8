"""What a purchase is worth: the original's reward, with all its parts.

    reward = r_type (matched attributes + matched options + [price <= limit]) / (attributes + options + 1)

in [0, 1]. It is 1 only if everything that the goal names is matched by a product of the same kind.
"""

from collections.abc import Mapping
from typing import Any

from envs.webshop.goals import Goal
from envs.webshop.product import Product
from envs.webshop.similarity import matches, normalised_colour


def purchase_reward(
    bought: Product, options: Mapping[str, str], price: float, goal: Goal, *, fair_options: bool = False
) -> tuple[float, dict[str, Any]]:
    """The reward of a purchase.

    Args:
      bought: the product.
      options: name -> value as chosen.
      price: of the product, dollars.
      goal: what was asked for.
      fair_options: see `matched_options`.

    Returns:
      reward: in [0, 1].
      parts: r_type, query_match, category_match, title_score; r_att, r_option (fractions that match) and r_price
        with their weights w_att, w_option, w_price. r_option and w_option are left out where the goal has no options.
    """
    parts = kind_reward(bought, goal.target)
    attributes = matched_attributes(bought, goal.attributes)
    chosen = matched_options(options, goal.options, fair=fair_options)
    affordable = price <= goal.price_limit
    parts_named = len(goal.attributes) + len(goal.options) + 1
    reward = (attributes + chosen + affordable) / parts_named * parts["r_type"]
    parts |= {"r_att": attributes / len(goal.attributes), "w_att": len(goal.attributes) / parts_named}
    if goal.options:
        parts |= {"r_option": chosen / len(goal.options), "w_option": len(goal.options) / parts_named}
    return reward, parts | {"r_price": affordable, "w_price": 1 / parts_named}


def kind_reward(bought: Product, target: Product) -> dict[str, Any]:
    """Whether two products are of one kind: 1, .5, .1 or 0, by how they were found, their paths and their titles.

    The title decides last: without a noun in common the reward is 0 even where the queries match. A target without
    nouns counts as one with a fifth of them in common.
    """
    query_match = bought.query == target.query
    paths = [{name.strip() for name in product.product_category.split("›")} for product in (bought, target)]
    category_match = len(paths[0] & paths[1]) >= 2
    title_score = 0.2
    if target.title_nouns:
        title_score = len(set(bought.title_nouns) & set(target.title_nouns)) / len(target.title_nouns)
    r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:
        r_type = 0.1 if title_score > 0 else 0.0
    return {
        "r_type": r_type,
        "query_match": query_match,
        "category_match": category_match,
        "title_score": title_score,
    }


def matched_attributes(bought: Product, wanted: tuple[str, ...]) -> int:
    """How many attributes the product's own attributes, title, features or description hold."""
    texts = (bought.title.lower(), " ".join(bought.bullets).lower(), bought.description.lower())
    return sum(
        any(matches(known, attribute) for known in bought.attributes) or any(attribute in text for text in texts)
        for attribute in wanted
    )


def matched_options(
    chosen: Mapping[str, str], wanted: Mapping[str, str] | tuple[str, ...], *, fair: bool = False
) -> int:
    """How many wanted options some chosen value matches, whatever its option's name.

    Args:
      chosen: name -> value.
      wanted: name -> value of a synthetic goal, or the values of a human one.
      fair: of a synthetic goal the original compares name and value at once, without normalising their colour, with
        a choice whose colour is normalised. So "2005black" (normalised to "black") never matches itself. Fair means
        that values are compared, the colours of both normalised, as for human goals, and that a value matches itself.
    """
    picks = list(chosen.values())
    if fair and isinstance(wanted, Mapping):
        wanted = tuple(wanted.values())
    asked = list(wanted.items() if isinstance(wanted, Mapping) else wanted)

    def found(value):
        if fair and value in picks:
            return True
        return any(matches(normalised_colour(pick), normalised_colour(value)) for pick in picks)

    return sum(map(found, asked))
