"""Losses written in numpy, brought to the parameters of the models through a plain forward pass."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import learner_reference
from tests.learner_cases import actor_params, critic_params


class Rows:
    """A line for each trajectory: what a plain loss reads there in float64, and its derivative brought to parameters.

    Always 16 lines, so that the few programs compile once.
    """

    def __init__(self, trajectories):
        ids, self.spans = learner_reference.lines(trajectories)
        self.ids = np.pad(ids, ((0, 16 - len(ids)), (0, 0)))
        self.columns = [np.concatenate([np.arange(start, start + n) for start, n in own]) for own in self.spans]

    def logprobs(self, params):
        return np.asarray(learner_reference.next_logprobs(params, self.ids, 1.0), np.float64)

    def values(self, params):
        return np.asarray(learner_reference.all_values(params, self.ids), np.float64)

    def sampled(self, x):
        return np.concatenate([x[m, columns] for m, columns in enumerate(self.columns)])

    def pull_back(self, slope):
        """Gradient by the policy's parameters of the loss whose derivative by the log-probs is `slope`."""
        return _pull_back(actor_params(), self.ids, slope.astype(np.float32))

    def pull_back_values(self, slope):
        return pull_back_values(critic_params(), self.ids, slope.astype(np.float32))


@jax.jit
def _pull_back(params, ids, slope):
    return jax.grad(lambda p: jnp.sum(slope * learner_reference.next_logprobs(p, ids, 1.0)))(params)


@jax.jit
def pull_back_values(params, ids, slope):
    return jax.grad(lambda p: jnp.sum(slope * learner_reference.all_values(p, ids)))(params)
