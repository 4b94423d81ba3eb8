"""How fast the critic learns beside the actor: turn-PPO on Sokoban with ratios from 1 to 20 and three actor rates.

    python -m turnppo_jax.compare --spec=configs/ablations/learning_rates.py:model=qwen2.5-3b --out=DIR

The paper (arXiv 2512.17008) finds that a critic 5 to 10 times as fast as the actor works best; its runs have 1e-5 over
1e-6, which is the first arm here. Its figure's numbers are not in print. Not run.
"""

from typing import Any


def get_spec(argument: str = "") -> dict[str, Any]:
    """The arms; `argument` is that of configs/paper/sokoban.py without `algo`."""
    rates = [(1e-6, ratio) for ratio in (10, 1, 2, 5, 20)] + [(5e-7, 10), (3e-6, 10)]
    return {
        "seeds": [0, 1, 2],
        "arms": {
            f"actor_{actor:g}-critic_x{ratio}": {
                "config": f"configs/paper/sokoban.py:algo=turn_ppo,{argument}".rstrip(","),
                "overrides": {
                    "actor_optimizer.learning_rate": actor,
                    "critic_optimizer.learning_rate": actor * ratio,
                },
            }
            for actor, ratio in rates
        },
    }
