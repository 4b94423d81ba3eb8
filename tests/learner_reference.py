"""One update written the plain way: a row for each trajectory, whole logits, sums in Python. The learner's oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests import kernel_oracle
from tests.learner_cases import SIZES
from turnppo_jax.models.critic import ValueHead, bind_critic
from turnppo_jax.models.decoder import bind

LENGTH = 40  # longer than any trajectory; what stands after its end cannot reach what stands before


def lines(trajectories):
    """(ids [M, LENGTH], per trajectory its [(start, length) of each response])."""
    ids, spans = np.zeros((len(trajectories), LENGTH), np.int32), []
    for m, trajectory in enumerate(trajectories):
        line, own = [], []
        for turn in trajectory.turns:
            line += turn.prompt_ids.tolist()
            own.append((len(line), len(turn.response_ids)))
            line += turn.response_ids.tolist()
        ids[m, : len(line)] = line
        spans.append(own)
    return ids, spans


def _hidden(model, ids):
    return model.hidden_states(ids, jnp.broadcast_to(jnp.arange(LENGTH), ids.shape), jnp.ones_like(ids))


@jax.jit
def next_logprobs(params, ids, temperature):
    """[M, LENGTH]: log-prob of each id given those before it, from whole logits; the first column is 0."""
    model = bind(params, SIZES)
    logp = jax.nn.log_softmax(model.logits(_hidden(model, ids)[:, :-1]) / temperature, axis=-1)
    return jnp.pad(jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1)[..., 0], ((0, 0), (1, 0)))


@jax.jit
def all_values(critic, ids):
    """[M, LENGTH]: V of the state that ends with each id."""
    module = bind_critic(critic, SIZES)
    return module.values(_hidden(module.backbone, ids))


def shared_values(actor, head, ids):
    """The same, read from the policy's own hidden states."""
    return ValueHead(head)(_hidden(bind(actor, SIZES), ids))


def turn_logprobs(params, trajectories, temperature=1.0):
    """Log-probs by trajectory and turn, numpy."""
    ids, spans = lines(trajectories)
    logp = np.asarray(next_logprobs(params, ids, temperature))
    return [[logp[m, s : s + n] for s, n in own] for m, own in enumerate(spans)]


def estimates(values, trajectories, gamma, gae_lambda, level="turn"):
    """(whitened advantages, returns to go) by trajectory, float64; values [M, LENGTH] of every state."""
    _, spans = lines(trajectories)
    advantages, returns = [], []
    for m, (trajectory, own) in enumerate(zip(trajectories, spans)):
        if level == "turn":
            rewards = [turn.reward for turn in trajectory.turns]
            v = [values[m, s - 1] for s, _ in own]
        else:
            rewards = [r for turn in trajectory.turns for r in [0.0] * (len(turn.response_ids) - 1) + [turn.reward]]
            v = [values[m, t - 1] for s, n in own for t in range(s, s + n)]
        everything = [[True] * len(v)]
        a, _ = kernel_oracle.gae([rewards], [v], everything, gamma, gae_lambda)
        _, r = kernel_oracle.gae([rewards], [[0.0] * len(v)], everything, gamma, 1.0)
        advantages.append(a[0])
        returns.append(r[0])
    entries = np.concatenate(advantages)
    return [(a - entries.mean()) / entries.std(ddof=1) for a in advantages], returns


def policy_loss(params, trajectories, advantages, temperature=1.0, level="turn", ref=None, kl_coef=0.0, cap=None):
    """(loss, loss without its KL term) at ratio 1, clip .2, dual clip 3, normalizer trajectory_tokens.

    With a cap, each entry is weighted by min(exp(old − behavior), cap).
    """
    ids, spans = lines(trajectories)
    new = next_logprobs(params, ids, temperature)
    old = jax.lax.stop_gradient(new)
    reference = new if ref is None else next_logprobs(ref, ids, temperature)
    total = kl = 0.0
    for m, (trajectory, own) in enumerate(zip(trajectories, spans)):
        n_i, entry = sum(n for _, n in own), 0
        for turn, (start, n) in zip(trajectory.turns, own):
            pieces = [(start, n)] if level == "turn" else [(t, 1) for t in range(start, start + n)]
            for s, size in pieces:
                a, where = advantages[m][entry], slice(s, s + size)
                entry += 1
                ratio = jnp.exp(jnp.sum(new[m, where] - old[m, where]))
                loss = jnp.maximum(-a * ratio, -a * jnp.clip(ratio, 0.8, 1.2))
                loss = jnp.minimum(loss, -a * 3.0) if a < 0 else loss
                if cap is not None:
                    behavior = turn.behavior_logprobs[s - start : s - start + size]
                    loss *= jnp.minimum(jnp.exp(jnp.sum(old[m, where] - behavior)), cap)
                d = new[m, where] - reference[m, where]
                total += loss / (len(trajectories) * n_i)
                kl += jnp.sum(jnp.exp(-d) - 1 + d) / (len(trajectories) * n_i)
    return total + kl_coef * kl, total


def value_loss(values, trajectories, returns, level="turn"):
    """1/M Σ_i 1/N_i Σ_k (1/n_k Σ_t) 1/2 (V − R)²; values [M, LENGTH]."""
    _, spans = lines(trajectories)
    total = 0.0
    for m, own in enumerate(spans):
        entry = 0
        for start, n in own:
            size = 1 if level == "turn" else n
            for t in range(start, start + size):
                error = values[m, t - 1] - np.float32(returns[m][entry])
                total += 0.5 * error**2 / (len(trajectories) * len(own) * size)
                entry += 1
    return total


def turn_ppo(actor, critic, ref, trajectories, *, gamma, gae_lambda, temperature, kl_coef):
    """(policy loss, value loss, gradients of both, whitened advantages) of one turn-PPO minibatch."""
    ids, _ = lines(trajectories)
    advantages, returns = estimates(np.asarray(all_values(critic, ids), np.float64), trajectories, gamma, gae_lambda)
    of_actor = functools.partial(
        policy_loss, trajectories=trajectories, advantages=advantages, temperature=temperature, ref=ref, kl_coef=kl_coef
    )
    (_, policy), actor_gradient = jax.jit(jax.value_and_grad(of_actor, has_aux=True))(actor)
    value, critic_gradient = jax.jit(
        jax.value_and_grad(lambda c: value_loss(all_values(c, ids), trajectories, returns))
    )(critic)
    return policy, value, actor_gradient, critic_gradient, advantages
