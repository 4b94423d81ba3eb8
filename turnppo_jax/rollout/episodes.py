"""Playing episodes: environments on one side, the scheduler on the other, trajectories out.

Slot i plays in environment i of the pool from reset to end; then the next episode takes both. The same
keys give the same trajectories however the environments are timed, because nothing here that depends on
time reaches the numbers: order of play decides only when a token is drawn, not which.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from turnppo_jax.rollout.chat import Chat
from turnppo_jax.rollout.pool import EnvPool, EnvReply
from turnppo_jax.rollout.prefix import Prefix
from turnppo_jax.rollout.scheduler import Response, Scheduler
from turnppo_jax.types import StopReason, Trajectory, Turn

_IDLE_POLL_S = 1.0


@dataclasses.dataclass(frozen=True)
class Episode:
    """An episode to play.

    Attributes:
      index: its place in the rollout; becomes `Trajectory.episode`.
      seed: the environment's seed.
      group: episodes with equal group answer the same prompt.
      key: [2] uint32 key data that its tokens are drawn with.
      prefix: its beginning, where that is given. The trajectory holds these turns too, as they are, and all limits
        hold for them and the new ones together. An environment that shows something else than it did before counts as
        one that failed.
    """

    index: int
    seed: int
    group: int
    key: np.ndarray
    prefix: Prefix | None = None


@dataclasses.dataclass(frozen=True)
class PlayLimits:
    """Limits of an episode.

    Attributes:
      max_turns: turns at most; the environment's own limit may be lower.
      max_turn_tokens: sampled tokens of one turn at most.
      max_retries: how often an episode is started again after its environment failed.
    """

    max_turns: int
    max_turn_tokens: int
    max_retries: int = 2

    def __post_init__(self):
        for name, least in (("max_turns", 1), ("max_turn_tokens", 1), ("max_retries", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"rollout.{name} must be at least {least}, got {getattr(self, name)}")


@dataclasses.dataclass
class _Running:
    """An episode in a slot."""

    episode: Episode
    tries: int = 0
    observation: str = ""
    prompt_ids: np.ndarray | None = None
    response: Response | None = None
    turns: list[Turn] = dataclasses.field(default_factory=list)
    info: dict = dataclasses.field(default_factory=dict)
    instructions: str = ""


def play_episodes(
    episodes: Sequence[Episode],
    scheduler: Scheduler,
    pool: EnvPool,
    chat: Chat,
    limits: PlayLimits,
    *,
    policy_step: int,
    on_round: Callable[[int, int], None] | None = None,
) -> tuple[list[Trajectory], dict[str, float]]:
    """Plays every episode to its end.

    Args:
      episodes: what to play, in order of start.
      scheduler: who samples.
      pool: who answers; one environment for each slot of the sampler.
      chat: who translates.
      limits: see PlayLimits.
      policy_step: recorded with each turn.
      on_round: called with (episodes finished, episodes in all) in every round, many times a second.

    Returns:
      The trajectories by rising index, without those whose environment failed more often than allowed,
      and counts under the names that become metrics.
    """
    player = _Player(episodes, scheduler, pool, chat, limits, policy_step)
    started = time.perf_counter()
    while player.unfinished:
        player.start_waiting_episodes()
        scheduler.launch()
        # While the device draws, the environments' answers are turned into prompts.
        player.handle_replies(timeout_s=0.0 if scheduler.busy else _IDLE_POLL_S)
        player.handle_responses(scheduler.collect())
        if on_round:
            on_round(player.num_finished, len(episodes))
    counts = {**player.counts, **scheduler.counts, "rollout_s": time.perf_counter() - started}
    return sorted(player.finished, key=lambda trajectory: trajectory.episode), counts


class _Player:
    def __init__(self, episodes, scheduler, pool, chat, limits, policy_step):
        self._waiting = collections.deque(_Running(episode) for episode in episodes)
        self._running: dict[int, _Running] = {}
        self._free = list(range(pool.num_envs))[::-1]
        self._scheduler, self._pool, self._chat = scheduler, pool, chat
        self._limits, self._policy_step = limits, policy_step
        self._total = len(episodes)
        self.finished: list[Trajectory] = []
        self.counts = collections.Counter(env_errors=0, env_timeouts=0, dropped_episodes=0, context_overflows=0)

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_finished(self) -> int:
        return self._total - len(self._waiting) - len(self._running)

    def start_waiting_episodes(self) -> None:
        while self._free and self._waiting:
            slot, running = self._free.pop(), self._waiting.popleft()
            self._running[slot] = running
            self._pool.reset(slot, running.episode.seed)

    def handle_replies(self, timeout_s: float) -> None:
        for reply in self._pool.poll(timeout_s):
            running = self._running[reply.index]
            if reply.kind == "error":
                self._environment_failed(reply, running)
            elif reply.kind == "reset":
                self._begin(reply, running)
            elif running.response is None:  # nothing was drawn yet: an answer to a turn of the prefix
                self._replay(reply, running)
            else:
                self._answer(reply, running)

    def handle_responses(self, responses: list[Response]) -> None:
        for response in responses:
            running = self._running[response.slot]
            running.response = response
            self._pool.step(response.slot, self._chat.decode(response.ids))

    def _begin(self, reply: EnvReply, running: _Running) -> None:
        running.observation, running.info, running.instructions = reply.observation, reply.info, reply.instructions
        self._scheduler.open(reply.index, running.episode.key)
        prefix = running.episode.prefix
        if prefix and not self._as_before(reply, running):
            return
        if prefix and prefix.turns:
            self._pool.step(reply.index, prefix.turns[0].action)
            return
        prompt_ids = self._chat.first_prompt(reply.observation, reply.instructions)
        if len(prompt_ids) >= self._scheduler.context_length:
            self.counts["context_overflows"] += 1
            self._end(reply, terminated=False, truncated=True, final_prompt_ids=None)
        else:
            self._ask(reply.index, running, prompt_ids)

    def _replay(self, reply: EnvReply, running: _Running) -> None:
        """The environment's answer to a turn of the prefix: the next one, or the first question of its own."""
        prefix = running.episode.prefix
        running.turns.append(prefix.turns[len(running.turns)])
        if not self._as_before(reply, running):
            return
        if len(running.turns) < len(prefix.turns):
            self._pool.step(reply.index, prefix.turns[len(running.turns)].action)
        else:
            self._go_on(reply, running, context=prefix.token_ids)

    def _as_before(self, reply: EnvReply, running: _Running) -> bool:
        """Whether the environment shows what it showed when the prefix was played; where not, the episode fails."""
        prefix, number = running.episode.prefix, len(running.turns)
        ended = reply.terminated or reply.truncated
        if not ended and reply.observation == prefix.observation_after(number):
            return True
        error = f"after {number} turns it shows something else than it did before; a seed and its actions must tell all"
        self._environment_failed(dataclasses.replace(reply, kind="error", error=error), running)
        return False

    def _ask(
        self, slot: int, running: _Running, prompt_ids: np.ndarray, context: Sequence[np.ndarray] = ()
    ) -> None:  # fmt: skip
        """Asks for a response to the prompt, after `context` that the slot does not hold yet."""
        running.prompt_ids = prompt_ids
        self._scheduler.extend(slot, np.concatenate([*context, prompt_ids]), self._limits.max_turn_tokens)

    def _answer(self, reply: EnvReply, running: _Running) -> None:
        """The environment's answer to a response: the turn is complete."""
        response = running.response
        running.turns.append(
            Turn(
                prompt_ids=np.asarray(running.prompt_ids, np.int32),
                response_ids=response.ids,
                behavior_logprobs=response.logprobs,
                reward=float(reply.reward),
                stop=response.stop,
                policy_step=self._policy_step,
                observation=running.observation,
                action=self._chat.decode(response.ids),
                info=reply.info,
            )
        )
        if reply.terminated:
            self._end(reply, terminated=True, truncated=reply.truncated, final_prompt_ids=None)
        else:
            self._go_on(reply, running)

    def _go_on(self, reply: EnvReply, running: _Running, context: Sequence[np.ndarray] = ()) -> None:
        """After a turn that left the task open: the next question, or a limit."""
        prompt_ids = self._chat.next_prompt(reply.observation, ended=running.turns[-1].stop == StopReason.EOS)
        room = self._scheduler.room(reply.index) - sum(map(len, context)) - len(prompt_ids)
        if reply.truncated or len(running.turns) >= self._limits.max_turns or room < 1:
            self.counts["context_overflows"] += room < 0
            self._end(reply, terminated=False, truncated=True, final_prompt_ids=prompt_ids if room >= 0 else None)
            return
        running.observation = reply.observation
        self._ask(reply.index, running, prompt_ids, context)

    def _end(
        self, reply: EnvReply, *, terminated: bool, truncated: bool, final_prompt_ids: np.ndarray | None
    ) -> None:  # fmt: skip
        running = self._running[reply.index]
        self.finished.append(
            Trajectory(
                turns=running.turns,
                terminated=terminated,
                truncated=truncated,
                group=running.episode.group,
                seed=running.episode.seed,
                episode=running.episode.index,
                final_prompt_ids=final_prompt_ids,
                info=running.info,
                instructions=running.instructions,
                final_observation=reply.observation if running.turns else None,
            )
        )
        self._free_slot(reply.index)

    def _environment_failed(self, reply: EnvReply, running: _Running) -> None:
        self.counts["env_errors"] += 1
        self.counts["env_timeouts"] += reply.timed_out
        self._free_slot(reply.index)
        if running.tries < self._limits.max_retries:
            self._waiting.appendleft(_Running(running.episode, tries=running.tries + 1))
            return
        self.counts["dropped_episodes"] += 1
        print(
            f"episode {running.episode.index} (seed {running.episode.seed}) is dropped after "
            f"{running.tries + 1} tries: {reply.error}",
            flush=True,
        )

    def _free_slot(self, slot: int) -> None:
        del self._running[slot]
        self._scheduler.close(slot)
        self._free.append(slot)
