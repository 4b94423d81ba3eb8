"""Arithmetic expressions of + - * /, brackets and whole numbers: read strictly and valued exactly, nothing executed.

    expression = term { ("+" | "-") term }      term = factor { ("*" | "/") factor }
    factor = number | "(" expression ")"        number = one or more of 0-9

Blanks may stand between the parts. There is no sign: "-3" is none. Linear in the length of the text, without
recursion, so no text is too deep.
"""

import re
from fractions import Fraction

_PART = re.compile(r"[ \t\r\n]*(?:([0-9]+)|([-+*/()]))")
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2}


def parse(text: str) -> list[str] | None:
    """The parts of an expression in postfix order, numbers as written; None for any other text."""
    text = text.rstrip(" \t\r\n")
    output: list[str] = []
    waiting: list[str] = []  # operators and open brackets
    wants_operand, at = True, 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            return None
        at = part.end()
        number, symbol = part.groups()
        if (number is not None or symbol == "(") != wants_operand:
            return None
        if number is not None:
            output.append(number)
            wants_operand = False
        elif symbol == "(":
            waiting.append(symbol)
        elif symbol == ")":
            while waiting and waiting[-1] != "(":
                output.append(waiting.pop())
            if not waiting:
                return None
            waiting.pop()
        else:
            while waiting and waiting[-1] != "(" and _RANK[waiting[-1]] >= _RANK[symbol]:
                output.append(waiting.pop())
            waiting.append(symbol)
            wants_operand = True
    if wants_operand or "(" in waiting:
        return None
    return output + waiting[::-1]


def numbers_of(postfix: list[str]) -> list[str]:
    """The numbers of a parsed expression, as written, from left to right."""
    return [part for part in postfix if part not in _RANK]


def value_of(postfix: list[str]) -> Fraction | None:
    """The exact value of a parsed expression; None where it divides by zero."""
    stack: list[Fraction] = []
    for part in postfix:
        if part not in _RANK:
            stack.append(Fraction(int(part)))
            continue
        right, left = stack.pop(), stack.pop()
        if part == "/" and right == 0:
            return None
        stack.append(combine(part, left, right))
    return stack[0]


def combine(operator: str, left: Fraction, right: Fraction) -> Fraction:
    """`left operator right`."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right if operator == "*" else left / right
