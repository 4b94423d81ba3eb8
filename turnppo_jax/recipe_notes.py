"""Where a config leaves the recipe of Turn-PPO (arXiv 2512.17008, Table 2 and its ablations)."""

from turnppo_jax.settings import RunSettings

_CRITIC_RATES = (5.0, 10.0)  # critic over actor learning rate; the paper's own is 1e-5 over 1e-6
_ROUNDING = 1e-9  # 1e-5 / 1e-6 is not quite 10


def recipe_notes(settings: RunSettings) -> list[str]:
    """One line for each way in which the settings differ from what the paper found to work; none of it is an error.

    Args:
      settings: of the run.
    """
    cfg = settings.learner.algorithm
    lines = []
    actor_rate = settings.actor_optimizer.learning_rate
    if cfg.has_critic and not cfg.share_backbone and actor_rate > 0:
        ratio = settings.critic_optimizer.learning_rate / actor_rate
        if not _CRITIC_RATES[0] * (1 - _ROUNDING) <= ratio <= _CRITIC_RATES[1] * (1 + _ROUNDING):
            lines.append(
                f"critic_optimizer.learning_rate={settings.critic_optimizer.learning_rate:g} is {ratio:.3g} times "
                f"actor_optimizer.learning_rate={actor_rate:g}; the paper's recipe: 5 to 10 times"
            )
    if cfg.has_critic and cfg.group_size > 1:
        lines.append(
            f"algorithm.group_size={cfg.group_size} with a critic; the paper's recipe: 1, a prompt for every trajectory"
        )
    if 0 < settings.steps <= cfg.critic_warmup_steps:
        lines.append(
            f"algorithm.critic_warmup_steps={cfg.critic_warmup_steps} with steps={settings.steps}: the critic alone "
            "learns, the policy never"
        )
    if cfg.epochs > 1:
        lines.append(
            f"algorithm.epochs={cfg.epochs}; the paper's recipe: 1, each rollout trained on once in several minibatches"
        )
    return lines
