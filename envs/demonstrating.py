"""What the demonstrating functions of all environments have in common: two arguments, and their check."""

THINK_STYLES = ("none", "plan")


def check_demonstrations(*, noise: float, think: str) -> None:
    """Raises ValueError, by name, for an argument out of range."""
    if not 0 <= noise <= 1:
        raise ValueError(f"noise must be in [0, 1], got {noise!r}")
    if think not in THINK_STYLES:
        raise ValueError(f"unknown think {think!r}; known: {', '.join(THINK_STYLES)}")
