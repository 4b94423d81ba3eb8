"""What the policy reads: the wording of instructions and turns."""

from envs.sokoban import rules

STYLES = ("full", "compact")

_LEGEND = (
    f"{rules.WALL} wall, {rules.FLOOR} floor, {rules.TARGET} target, {rules.BOX} box, "
    f"{rules.BOX_ON_TARGET} box on a target, {rules.PLAYER} you, {rules.PLAYER_ON_TARGET} you on a target"
)


def instructions(style: str, *, actions_per_turn: int, max_actions: int, max_turns: int, thinking: bool) -> str:
    """The system prompt: rules, symbols, actions, limits, response format. "" for the compact style."""
    if style == "compact":
        return ""
    several = (
        f"You may give up to {actions_per_turn} actions in one answer, separated by ||."
        if actions_per_turn > 1
        else "Give exactly one action in each answer."
    )
    example = "Right || Right || Up" if actions_per_turn > 2 else "Right"
    think = "<think>your reasoning</think>" if thinking else ""
    return (
        "You are solving a Sokoban puzzle. Bring every box onto a target.\n"
        "You move one cell at a time. Walking into a box pushes it one cell on, provided that the cell "
        "behind it is free. Boxes cannot be pulled, and nothing passes through walls. Think ahead: a box "
        "in a corner stays there.\n"
        f"Symbols: {_LEGEND}.\n"
        f"Actions: {', '.join(rules.ACTIONS)}. {several} "
        f"The puzzle allows {max_actions} actions and {max_turns} turns in all.\n"
        f"Rewards: {rules.STEP_REWARD} for each action, +{rules.BOX_REWARD:g} for a box that comes onto a target, "
        f"-{rules.BOX_REWARD:g} for one that leaves it, +{rules.SOLVED_REWARD:g} when every box is on a target.\n"
        f"Reply in exactly this form: {think}<answer>{example}</answer>"
    )


def turn(
    style: str,
    room: rules.Room,
    *,
    number: int,
    max_turns: int,
    actions_left: int,
    last_reward: float | None,
    invalid: bool,
    thinking: bool,
) -> str:
    """The observation of one turn.

    Args:
      style: "full", or "compact": the rows of the grid without its border, which is always wall, and a last line with
        the actions left.
      room: as it is now.
      number: of the turn that answers this observation, from 1.
      max_turns: of the episode.
      actions_left: of the episode.
      last_reward: of the turn before, None in the first.
      invalid: the turn before was charged the format penalty.
      thinking: whether the response holds a thinking block.
    """
    if style == "compact":
        inside = "\n".join(row[1:-1] for row in room.rows()[1:-1])
        return f"{inside}\n{actions_left}"
    grid = "\n".join(room.rows())
    before = "" if last_reward is None else f"Reward of your last turn: {last_reward:g}\n"
    if invalid:
        before += "Your last answer was not valid: use the response form and the action names given.\n"
    form = "<think>...</think><answer>...</answer>" if thinking else "<answer>...</answer>"
    return (
        f"{before}Turn {number} of {max_turns}\nState:\n{grid}\nYou have {actions_left} actions left. Reply as {form}."
    )
