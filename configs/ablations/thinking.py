"""With and without a thinking block: turn-PPO and token PPO on WebShop.

    python -m turnppo_jax.compare --spec=configs/ablations/thinking.py:model=qwen3-1.7b --out=DIR

The longer a response, the further apart are a token and a turn as units of decision. The two halves have prompts of
their own, so that only arms of the same half play the same text. Not run.
"""

from typing import Any


def get_spec(argument: str = "") -> dict[str, Any]:
    """The arms; `argument` is that of configs/paper/webshop.py without `algo` and `thinking`."""
    path, rest = "configs/paper/webshop.py", [argument] if argument else []
    return {
        "seeds": [0, 1, 2],
        "metric": "eval/webshop-ragen/score_mean",
        "arms": {
            f"{algo}-thinking_{thinking}": ",".join([f"{path}:algo={algo}", f"thinking={thinking}", *rest])
            for thinking in ("on", "off")
            for algo in ("turn_ppo", "token_ppo")
        },
    }
