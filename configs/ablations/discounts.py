"""γ and λ of turn-PPO on Sokoban, and of token PPO, whose horizon is tokens.

    python -m turnppo_jax.compare --spec=configs/ablations/discounts.py:model=qwen2.5-3b --out=DIR

The paper (arXiv 2512.17008) has γ .99 and λ .9 over turns, the first arm. Over hundreds of tokens the same numbers
forget the end of the episode: token PPO has 1 and 1 in RAGEN. Not run.
"""

from typing import Any


def get_spec(argument: str = "") -> dict[str, Any]:
    """The arms; `argument` is that of configs/paper/sokoban.py without `algo`."""
    pairs = [("turn_ppo", gamma, lam) for gamma in (0.99, 0.95, 1.0) for lam in (0.9, 0.95, 1.0)]
    pairs += [("token_ppo", 1.0, 1.0), ("token_ppo", 0.99, 0.9), ("token_ppo", 1.0, 0.99)]
    return {
        "seeds": [0, 1, 2],
        "arms": {
            f"{algo}-gamma_{gamma:g}-lambda_{lam:g}": {
                "config": f"configs/paper/sokoban.py:algo={algo},{argument}".rstrip(","),
                "overrides": {"algorithm.gamma": gamma, "algorithm.gae_lambda": lam},
            }
            for algo, gamma, lam in pairs
        },
    }
