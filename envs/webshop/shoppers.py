"""Scripted shoppers: the one that knows the product it wants, and the one that buys the first it sees.

A shopper is a function of the visit and the goal that gives the next action. It keeps nothing between turns, so that it
also goes on from wherever something else has led.
"""

from collections.abc import Callable, Iterable
from typing import Any

from envs.webshop.actions import CLICK, SEARCH, Action
from envs.webshop.env import WebShopEnv
from envs.webshop.goals import Goal
from envs.webshop.pages import BACK, BUTTON, BUY, NEXT, PREVIOUS
from envs.webshop.product import Product
from envs.webshop.session import Session
from envs.webshop.similarity import matches, normalised_colour

QUERIES = ("instruction", "request", "query")

Shopper = Callable[[Session, Goal], Action]

_BUY, _BACK, _NEXT, _PREVIOUS = (Action(CLICK, name.lower()) for name in (BUY, BACK, NEXT, PREVIOUS))


def search_text(goal: Goal, query: str) -> str:
    """What to search for, fit for the brackets of an action.

    Args:
      goal: what is asked for.
      query: "instruction" (all of it), "request" (without options, price and "find me") or "query" (what the shop's
        makers searched for to find the product: its kind in a few words).
    """
    text = goal.instruction
    if query == "request":
        text = text.rpartition(", and price lower than ")[0] or text
        if isinstance(goal.options, dict):
            text = goal.target.instruction
    elif query == "query":
        text = goal.target.query or text
    text = " ".join(text.replace("[", " ").replace("]", " ").lower().split())
    return text.removeprefix("find me ") if query == "request" else text


def choices(product: Product, goal: Goal) -> list[str]:
    """The values of a product's options to click for a goal: those that it names, else those that are most alike.

    One for each option. A value under several names is the last one's, as in the shop.
    """
    wanted = goal.options.values() if isinstance(goal.options, dict) else goal.options
    option_of = {value: name for name, values in product.options.items() for value in values}
    chosen: dict[str, str] = {}
    for asked in wanted:
        colour = normalised_colour(asked)
        alike = [asked] if asked in option_of else []
        alike += [value for value in option_of if matches(normalised_colour(value), colour)]
        for value in alike:
            if chosen.setdefault(option_of[value], value) == value:
                break
    return list(chosen.values())


def knowing(query: str = "instruction") -> Shopper:
    """The shopper that knows the goal's product: searches, turns pages to it, chooses the options, buys.

    It searches for `query` first and for the whole instruction if that does not find the product; then it takes the
    first one found.
    """
    if query not in QUERIES:
        raise ValueError(f"unknown query {query!r}; known: {', '.join(QUERIES)}")

    def shopper(session: Session, goal: Goal) -> Action:
        texts = list(dict.fromkeys(search_text(goal, name) for name in (query, "instruction")))
        found = session.keywords in texts
        results = [int(index) for index in session.results]
        if not found or session.place == "search":
            return Action(SEARCH, texts[0])
        target = goal.product
        if target not in results:
            if session.keywords != texts[-1]:
                return Action(SEARCH, texts[-1])
            if not results:
                return _BACK
            target = results[0]
        return _towards(session, goal, target, results)

    return shopper


def first_item(session: Session, goal: Goal) -> Action:
    """Searches the instruction and buys the first product that is found, with whatever options."""
    if session.place == "item":
        return _BUY
    if session.place != "results":
        return Action(SEARCH, search_text(goal, "instruction"))
    shown = session.shown_products()
    return Action(CLICK, shown[0].asin.lower()) if shown else _BACK


def _towards(session: Session, goal: Goal, target: int, results: list[int]) -> Action:
    """The next step from a page that follows the search to a purchase of `target`."""
    if session.place == "results":
        shown = [int(index) for index in session.shown_results()]
        if target in shown:
            return Action(CLICK, session.shown_products()[shown.index(target)].asin.lower())
        after = not shown or results.index(target) < results.index(shown[0])
        return _PREVIOUS if after else _NEXT
    if session.place != "item" or session.product != target:
        return _PREVIOUS
    buttons = {part.text.lower() for part in session.page if part.kind == BUTTON}
    for value in choices(session.shown_product(), goal):
        # A value that reads like a button cannot be chosen.
        if value not in session.options.values() and value not in buttons and value in session.clickables:
            return Action(CLICK, value)
    return _BUY


def play(env: WebShopEnv, shopper: Shopper, seeds: Iterable[int]) -> list[dict[str, Any]]:
    """Plays episodes with a shopper through the environment's own prompts and answers.

    Returns:
      Of each seed score, success and num_turns.
    """
    played = []
    for seed in seeds:
        env.reset(seed)
        ended = False
        while not ended:
            response = env.write_response(shopper(env.session, env.goal))
            *_, terminated, truncated, info = env.step(response)
            ended = terminated or truncated
        played.append({name: info[name] for name in ("score", "success", "num_turns")})
    return played
