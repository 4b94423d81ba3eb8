"""How the critic's errors are weighted: every trajectory alike, as the paper prints it, or every decision alike.

    python -m turnppo_jax.compare --spec=configs/ablations/value_weights.py --out=DIR

The paper's critic loss is (1/G) Σ_i (1/N_i) Σ_k ½ (V − R)², over the N_i turns of trajectory i. N_i is known only
after state s has been left, so the minimiser is not E[R | s] but E[R / N | s] / E[1 / N | s]: where success ends an
episode early, V is too large wherever success is possible, and δ = r + γ V' − V too small where the episode goes on.
With λ = 1 that is a baseline's error, with λ below 1 it is in the advantage. `value_normalizer="turns"` (or "tokens")
weights decisions alike, and the minimiser is E[R | s]. Arms, seeds, rates and the rule for a crash are those of
`estimators.py`; its rates were chosen with the paper's weights.
"""

from typing import Any

from configs.ablations import estimators

WEIGHTS = {"turn_ppo": "turns", "token_ppo": "tokens"}


def get_spec(argument: str = "") -> dict[str, Any]:
    """The arms; there is no argument."""
    if argument:
        raise ValueError(f"argument {argument!r}; allowed: none")
    spec = estimators.get_spec()
    arms = {}
    for name, weights in WEIGHTS.items():
        arm = spec["arms"][name]
        changed = arm["overrides"] | {"algorithm.value_normalizer": weights}
        arms |= {name: arm, f"{name}-by_{weights}": arm | {"overrides": changed}}
    return spec | {"arms": arms}
