"""What an agent may do in the shop: `search[keywords]` and `click[name]`, as the original reads them and as answers.

Two readers. `parse` is the original's own grammar, for scripts and comparisons with it. `read_answer` reads what a
policy answers; it is strict, so that a policy knows when it was not understood:

| answer | read as |
|---|---|
| `search[red shoes]`, also with white space around it | that action |
| `Search[Red Shoes]`, `CLICK[Buy Now]` | the same: letters count as their lower case, as they do in the shop |
| `search [x]`, `search:[x]`, `search(x)`, `x`, `I will search[x]`, `search[x].` | nothing |
| `search[]`, `search[ ]`, `click[]` | nothing |
| `search[x] search[y]`, `search[x] click[y]`, two lines | nothing: one action a turn |
| `search[a [b] c]` | keywords `a [b] c`: brackets inside are part of them as long as they pair up |
| `search[a]b]`, `search[a[b]` | nothing |
| `click[a [b]]` | the thing of that very name, if the page has it |
| `click[ buy now ]`, `click[buy  now]` | nothing, unless the page has that very name |
| `ｓｅａｒｃｈ［x］`, `search［x］` | nothing: full-width letters and brackets are other characters |
| `search[ｘ（ｙ）]` | keywords `ｘ（ｙ）`: inside the brackets any character counts as itself |
"""

import dataclasses
from collections.abc import Collection

SEARCH, CLICK = "search", "click"


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """One action.

    Attributes:
      name: "search" or "click".
      argument: keywords, or the name of what is clicked; lower case, not empty.
    """

    name: str
    argument: str

    def __str__(self) -> str:
        return f"{self.name}[{self.argument}]"


def parse(text: str) -> Action | None:
    r"""The action of a text in the original's grammar: the expression `(.+)\[(.+)\]` at its beginning, greedy.

    So the last `[` that a `]` follows counts, text after the last `]` is ignored, a line feed ends it, and names are
    lower case without white space. Linear in the length of the text, which the expression itself is not.

    Returns:
      The action, or None where there is none; the original then stays on the page.
    """
    line = text.partition("\n")[0]
    closing = line.rfind("]")
    # At least one character on either side of the opening bracket.
    opening = line.rfind("[", 1, max(closing - 1, 0))
    if opening < 0 or line[:opening] not in (SEARCH, CLICK):
        return None
    return Action(line[:opening], line[opening + 1 : closing].lower())


def read_answer(answer: str | None, clickables: Collection[str]) -> Action | None:
    """The one action of an answer; the module's table says how answers are read.

    Args:
      answer: what stands between the answer tags; None for a response without them.
      clickables: what can be clicked on the page, in lower case.

    Returns:
      The action, or None for an answer that is none or clicks what is not on the page.
    """
    if answer is None:
        return None
    answer = answer.strip()
    name, _, rest = answer.partition("[")
    # The lower case of some letters outside ASCII is an ASCII letter.
    if not name.isascii() or name.lower() not in (SEARCH, CLICK) or not rest.endswith("]"):
        return None
    name, argument = name.lower(), rest[:-1].lower()
    if name == CLICK:
        return Action(name, argument) if argument in clickables else None
    if not argument.strip() or "\n" in argument or "\r" in argument or not _paired(argument):
        return None
    return Action(name, argument)


def _paired(text: str) -> bool:
    depth = 0
    for character in text:
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
            if depth < 0:
                return False
    return depth == 0
