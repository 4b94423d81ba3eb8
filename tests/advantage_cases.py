"""The critic-free advantages by name: what each reads of a table, and options to run them all with."""

import functools

import jax

from turnppo_jax import kernels

KERNELS = {
    "whitened_returns": {"gamma": 0.9},
    "reinforce_baseline_advantages": {},
    "remax_advantages": {},
    "turn_index_advantages": {"gamma": 0.9, "absent": "zero"},
    "mt_grpo_advantages": {"gamma": 0.9, "turn_weight": 0.5},
    "gigpo_advantages": {"scale": "std"},
    "hgpo_advantages": {"history_length": 2, "scale": "std", "base": True},
}


def eager(name, table, *, base=False, **options):
    """The kernel by name, with what it reads of the table; `base` gives HGPO the scores for its level 0."""
    reads = {
        "whitened_returns": ("turn_rewards", "turn_mask"),
        "reinforce_baseline_advantages": ("scores", "group_ids", "turn_mask"),
        "remax_advantages": ("turn_rewards", "turn_mask", "scores"),
        "turn_index_advantages": ("turn_rewards", "turn_mask", "group_ids"),
        "mt_grpo_advantages": ("scores", "turn_rewards", "turn_mask", "group_ids"),
        "gigpo_advantages": ("scores", "turn_rewards", "turn_mask", "group_ids", "anchor_ids"),
        "hgpo_advantages": ("turn_rewards", "turn_mask", "group_ids", "anchor_ids"),
    }[name]
    options |= {"scores": table["scores"]} if base else {}
    return getattr(kernels, name)(*[table[field] for field in reads], **options)


@functools.cache
def _compiled(name, options):
    return jax.jit(functools.partial(eager, name, **dict(options)))


def call(name, table, **options):
    """`eager`, compiled once for each choice of options."""
    return _compiled(name, tuple(options.items()))(table)
