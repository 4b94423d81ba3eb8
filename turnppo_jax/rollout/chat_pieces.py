"""What a chat template writes around the messages, read off the template itself.

A conversation under an append-only template is

    head system? user generation response separator user generation response separator user generation ...

with the same `generation` and `separator` at every turn. Rendering a conversation whose contents are
marker words and cutting at the markers gives the pieces; comparing the cuts shows whether the template
is append-only at all.
"""

import dataclasses
from collections.abc import Callable, Sequence

_SYSTEM = "markersystem"
_USERS = ("markeruserone", "markerusertwo", "markeruserthree")
_ASSISTANTS = ("markerassistantone", "markerassistanttwo")


class TemplateError(ValueError):
    """A chat template that cannot be rendered by appending; the message says in which way."""


@dataclasses.dataclass(frozen=True)
class ChatPieces:
    """The text that a template writes around the contents of messages.

    Attributes:
      default_head: before the first user message when there is no system message; holds the template's
        default system prompt, if it has one.
      system_head: before the content of a system message; None where the template takes none.
      after_system: from there to the first user message.
      generation: from the end of a user message to the start of the response.
      separator: from the end of a response, its end-of-turn token first, to the next user message.
    """

    default_head: str
    system_head: str | None
    after_system: str
    generation: str
    separator: str


def derive_pieces(render: Callable[[list[dict]], str]) -> ChatPieces:
    """Reads the pieces off a template.

    Args:
      render: messages to text, the generation prompt added at the end. Raises TemplateError for
        messages that the template refuses.

    Raises:
      TemplateError: contents go missing or change places, or the text around a message depends on how
        many messages follow or precede it.
    """
    default_head, generation, separator = _pieces_of(render, system=False)
    try:
        render([{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USERS[0]}])
    except TemplateError:
        return ChatPieces(default_head, None, "", generation, separator)
    system_head, after_system, system_generation, system_separator = _pieces_of(render, system=True)
    _same("the generation prompt", "without a system message", generation, "with one", system_generation)
    _same("the separator of turns", "without a system message", separator, "with one", system_separator)
    return ChatPieces(default_head, system_head, after_system, generation, separator)


def _pieces_of(render, system: bool) -> tuple[str, ...]:
    """Head pieces (one, or two with a system message), generation and separator, compared over three turns."""
    head = [{"role": "system", "content": _SYSTEM}] if system else []
    user_1, user_2, user_3 = ({"role": "user", "content": text} for text in _USERS)
    assistant_1, assistant_2 = ({"role": "assistant", "content": text} for text in _ASSISTANTS)

    *heads, generation = _cut(render, [*head, user_1])
    whole = _cut(render, [*head, user_1, assistant_1, user_2, assistant_2, user_3])
    *whole_heads, history_1, separator_1, history_2, separator_2, last_generation = whole
    for before, later in zip(heads, whole_heads, strict=True):
        _same("the text before the first user message", "in one turn", before, "in three", later)
    _same("the generation prompt", "at the first turn", generation, "at the third", last_generation)
    _same("the text before a response", "at the first turn", history_1, "at the second", history_2)
    _same("the text after a response", "at the first turn", separator_1, "at the second", separator_2)
    # A generation prompt may say more than the template later repeats (Qwen3 without thinking opens with
    # an empty think block). What was in the context when the response was sampled stays there.
    if not generation.startswith(history_1):
        _same("the text before a response", "when it is sampled", generation, "in the history", history_1)
    return *heads, generation, separator_1


def _cut(render, messages: Sequence[dict]) -> list[str]:
    """Renders and returns the text before, between and after the contents."""
    rest, cuts = render(list(messages)), []
    for message in messages:
        if rest.count(message["content"]) != 1:
            raise TemplateError(
                f"the chat template is not append-only: it drops, repeats or moves the content of a {message['role']} "
                f"message in a conversation of {len(messages)} messages"
            )
        before, rest = rest.split(message["content"])
        cuts.append(before)
    return [*cuts, rest]


def _same(what: str, where: str, text: str, other_where: str, other: str) -> None:
    if text != other:
        raise TemplateError(
            f"the chat template is not append-only: {what} is {text!r} {where}, but {other!r} {other_where}"
        )
