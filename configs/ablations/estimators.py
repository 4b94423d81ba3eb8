"""Estimator comparison at 0.8M parameters: the paper's Table 1 in miniature, on Sokoban with a thinking block.

    python -m turnppo_jax.compare --spec=configs/ablations/estimators.py --out=DIR
    python -m turnppo_jax.compare --spec=configs/ablations/estimators.py:tune=turn_ppo --out=DIR

Four arms with equal numbers of trajectories (128 a step), of updates a rollout (4) and one warm start a seed: GRPO
(8 rooms of 16), token PPO, turn PPO, and turn advantages with the ratio per token. Reward on its own turn and dual clip
3 are the same for all, and so is the end of a crash: a run stops at the first alarm of `turnppo_jax.training.collapse`,
and its last evaluation is carried forward. A run counts with the mean of its last three evaluations, 1,024 episodes
on the same 256 held-out rooms. `tune=ARM` runs one arm for 40 steps with each of the actor rates that its own was
chosen from, on a seed that the comparison does not have; the critic's rate is 1e-3 everywhere.

Tuning, seed 100: success after 40 steps from .319 before (95 % intervals within +-.051):

    actor rate      1.5e-5  5e-5  1.5e-4  5e-4
    turn_ppo                .403  .414    crashed at step 36 (entropy; .103 at step 20)
    token_ppo               .403  .432    .237
    turn_advantage          .391  .405    .254
    grpo            .352    .359  .270    .141

GRPO's best of the three rates was their lowest, hence its fourth.
"""

from typing import Any

TUNING_SEED = 100
# Arm, which is the algorithm's name: the chosen actor rate, and those that it was chosen from.
ARMS: dict[str, tuple[float, tuple[float, ...]]] = {
    "turn_ppo": (1.5e-4, (5e-5, 1.5e-4, 5e-4)),
    "token_ppo": (1.5e-4, (5e-5, 1.5e-4, 5e-4)),
    "turn_advantage": (1.5e-4, (5e-5, 1.5e-4, 5e-4)),
    "grpo": (5e-5, (1.5e-5, 5e-5, 1.5e-4, 5e-4)),
}


def get_spec(argument: str = "") -> dict[str, Any]:
    """The arms; `argument` is "" or "tune=ARM"."""

    def arm(name: str, rate: float) -> dict[str, Any]:
        config = f"configs/sokoban_thinking.py:algo={name}"
        return {"config": config, "overrides": {"actor_optimizer.learning_rate": rate}}

    crash = {"collapse.stop_on_collapse": True}
    if not argument:
        arms = {name: arm(name, rate) for name, (rate, _) in ARMS.items()}
        return {"seeds": [0, 1, 2], "last": 3, "overrides": crash, "arms": arms}
    option, _, name = argument.partition("=")
    if option != "tune" or name not in ARMS:
        raise ValueError(f"argument {argument!r}; allowed: tune=NAME with NAME in {', '.join(ARMS)}")
    shorter = {"steps": 40, "evaluation.every": 20}
    arms = {f"{name}-{rate:g}": arm(name, rate) for rate in ARMS[name][1]}
    return {"seeds": [TUNING_SEED], "last": 1, "overrides": crash | shorter, "arms": arms}
