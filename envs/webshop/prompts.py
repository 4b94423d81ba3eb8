"""What the policy reads: the wording of instructions and turns.

Style "full" is for language models: instructions, then on every turn the page as the original shows it and the
admissible actions. Style "compact" is for tiny models that learn the shop from nothing: no instructions, the goal on
the first turn only, few words a page, all in lower case, and what can be clicked in brackets.
"""

from envs.webshop import pages
from envs.webshop.session import Session

STYLES = ("full", "compact")
OBSERVATIONS = ("text", "text_rich")

_SEPARATORS = {
    "text": "The parts of a page are separated by [SEP].",
    "text_rich": "What can be clicked stands between [button] and [button_], what was clicked between [clicked button] "
    "and [clicked button_].",
}


def instructions(style: str, *, observation: str, max_turns: int, thinking: bool) -> str:
    """The system prompt: task, actions, score, limit, response format. "" for the compact style."""
    if style == "compact":
        return ""
    think = "<think>your reasoning</think>" if thinking else ""
    return (
        "You are shopping in a web shop. Find a product that meets the instruction, choose the options that it names "
        "and buy it.\n"
        f"Each turn you read a page. {_SEPARATORS[observation]}\n"
        "Actions: search[keywords] looks for products; click[name] clicks a button, a product (by its code) or an "
        "option of the page. Click the options before buying; click[buy now] ends the visit.\n"
        "The score of a purchase lies between 0 and 1: the share of the instruction's attributes, options and price "
        "limit that are met, less if it is another kind of product. Buying nothing scores 0.\n"
        f"Give exactly one action a turn, one of those that are listed. You have {max_turns} turns.\n"
        f"Reply in exactly this form: {think}<answer>search[blue cotton shirt]</answer>"
    )


def turn(
    style: str,
    session: Session,
    *,
    instruction: str,
    observation: str,
    number: int,
    max_turns: int,
    invalid: bool,
    thinking: bool,
) -> str:
    """The observation of one turn.

    Args:
      style: "full" or "compact".
      session: as it is now.
      instruction: the goal's text.
      observation: "text" or "text_rich", how the full style shows the page.
      number: of the turn that answers this observation, from 1; after the last one the full style asks for none.
      max_turns: of the episode.
      invalid: the turn before was charged the format penalty.
      thinking: whether the response holds a thinking block.
    """
    left = max_turns - number + 1
    if style == "compact":
        return _compact(session, instruction if number == 1 else "", left)
    before = "Your last answer was not valid: use the response form and one listed action.\n" if invalid else ""
    page = session.as_text() if observation == "text" else session.as_rich_text().rstrip("\n")
    if session.bought or left == 0:
        return f"{before}{page}"
    form = "<think>...</think><answer>...</answer>" if thinking else "<answer>...</answer>"
    return (
        f"{before}Turn {number} of {max_turns}\n{page}\n"
        f"Available actions: {', '.join(admissible_actions(session))}\nReply as {form}."
    )


def admissible_actions(session: Session) -> tuple[str, ...]:
    """The actions that are possible on the page; that of searching, which takes any keywords, first."""
    if session.bought:
        return ()
    clicks = (f"click[{name}]" for name in session.clickables if name != pages.SEARCH.lower())
    return ("search[<keywords>]", *clicks)


def numbered_products(session: Session) -> dict[str, str]:
    """What the compact style lets be clicked by number: the products of a page of results, from "1", as asins."""
    if session.place != "results":
        return {}
    return {str(number): product.asin.lower() for number, product in enumerate(session.shown_products(), start=1)}


def _compact(session: Session, instruction: str, turns_left: int) -> str:
    lines = [instruction]
    if session.place == "results":
        for number, product in enumerate(session.shown_products(), start=1):
            lines.append(f"{number} {product.title} {product.price_label}")
    elif session.place == "item":
        product, chosen = session.shown_product(), session.options.values()
        lines.append(f"{product.title} {product.price_label}")
        for name, values in product.options.items():
            lines.append(" ".join([name, *(f"[{value}]{'*' * (value in chosen)}" for value in values)]))
    elif session.bought:
        lines.append("bought")
    elif session.place != "search":
        lines += [part.text.strip() for part in session.page[3:] if part.kind == pages.TEXT]
    lines.append(" ".join(f"[{part.text.lower()}]" for part in session.page if part.kind == pages.BUTTON))
    return "\n".join([*filter(None, lines), str(turns_left)]).lower()
