"""What environments of a single turn have in common: arguments, and an answer that ends the episode."""

import math

SPLITS = ("train", "eval", "seed")
PROMPTS = ("full", "compact")


def check_arguments(*, split: str, prompt: str, format_penalty: float) -> None:
    """Raises ValueError, by name, for an argument out of range."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    if prompt not in PROMPTS:
        raise ValueError(f"unknown prompt {prompt!r}; known: {', '.join(PROMPTS)}")
    if not (math.isfinite(format_penalty) and format_penalty <= 0):
        raise ValueError(f"format_penalty must be finite and at most 0, got {format_penalty!r}")


def response_form(inside: str, *, thinking: bool) -> str:
    """The response format as prompts show it."""
    return f"{'<think>...</think>' if thinking else ''}<answer>{inside}</answer>"
