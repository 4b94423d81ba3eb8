"""How the critic's errors are weighted: every trajectory alike, as the paper prints it, or every decision alike.

    python -m turnppo_jax.compare --spec=configs/ablations/value_weights.py --out=DIR

The paper's critic loss is (1/G) Σ_i (1/N_i) Σ_k ½ (V − R)², over the N_i turns of trajectory i. N_i is known only
after state s has been left, so the minimiser is not E[R | s] but E[R / N | s] / E[1 / N | s]: where success ends an
episode early, V is too large wherever success is possible, and δ = r + γ V' − V too small where the episode goes on.
With λ = 1 that is a baseline's error, with λ below 1 it is in the advantage. `value_normalizer="turns"` (or "tokens")
weights decisions alike, and the minimiser is E[R | s]. Arms, seeds, rates and the rule for a crash are those of
`estimators.py`; its rates were chosen with the paper's weights.

Run with seeds 0, 1, 2 (success after 60 steps; over the last 20 steps, mean V, mean return and the variance that V
explains at the starts of turns; the last three by `--metric=value/mean --last=20` and so on):

    turn_ppo             .430  V 2.77  R 1.58  .17
    turn_ppo-by_turns    .412  V 1.45  R 1.47  .24    success -.018 [-.083, +.046], paired, 95 % by t
    token_ppo            .456  V 3.21  R 1.84  .15
    token_ppo-by_tokens  .444  V 1.82  R 1.80  .25    success -.012 [-.126, +.102]

The bias is there and goes; success did not rise with it, on one seed it fell in both pairs.
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
