"""The response format `<think>…</think><answer>…</answer>`, read the same way by all environments."""

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_ANSWER_OPEN, _ANSWER_CLOSE = "<answer>", "</answer>"


def find_answer(text: str, *, thinking: bool) -> str | None:
    """The inside of the last complete answer after the thinking block.

    The thinking block ends at the first `</think>` after the first `<think>`; an answer drafted inside
    it does not count. Of nested answer tags the innermost pair counts. Tags are lower case. Other text
    around block and answer is ignored. Linear in the length of the text.

    Args:
      text: the whole response.
      thinking: whether the thinking block must be there; where it need not, but is, the answer still
        has to come after it.

    Returns:
      The text between the tags, unstripped, or None where the format is not met.
    """
    begin = 0
    think_open = text.find(_THINK_OPEN)
    think_close = text.find(_THINK_CLOSE, think_open + len(_THINK_OPEN)) if think_open >= 0 else -1
    if think_close >= 0:
        begin = think_close + len(_THINK_CLOSE)
    elif thinking or think_open >= 0:
        return None
    last_close = text.rfind(_ANSWER_CLOSE, begin)
    if last_close < 0:
        return None
    answer_open = text.rfind(_ANSWER_OPEN, begin, last_close)
    if answer_open < 0:
        return None
    inside = answer_open + len(_ANSWER_OPEN)
    return text[inside : text.find(_ANSWER_CLOSE, inside)]
