"""Warm start from a config: demonstrations, settings and the supervised loop put together.

A model that has never seen the response format earns no reward, so it first imitates a few demonstrations.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax.sharding import Mesh

from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.rollout.chat import Chat
from turnppo_jax.training import demonstrations as demos
from turnppo_jax.training.conversation_files import REASONS, Conversation, Selection, read_conversations
from turnppo_jax.training.optimizer import OptimizerConfig
from turnppo_jax.training.supervised import SupervisedConfig, train_supervised

# Environments that can demonstrate themselves: id -> "module:function" with the signature
# function(env_kwargs, seeds, *, env_id, run_seed, **options) -> iterator of {"messages": [...], "success": bool}.
DEMONSTRATIONS = {
    "sokoban": "envs.sokoban.demonstrations:demonstrations",
    "sokoban-2box": "envs.sokoban.demonstrations:demonstrations",
    "sokoban-boxoban": "envs.sokoban.demonstrations:demonstrations",
    "webshop": "envs.webshop.demonstrations:demonstrations",
    "webshop-ragen": "envs.webshop.demonstrations:demonstrations",
    "bandit": "envs.bandit.demonstrations:demonstrations",
    "countdown": "envs.countdown.demonstrations:demonstrations",
}

# Every field of `config.sft`, with its default.
SFT_DEFAULTS: dict[str, Any] = {
    "source": "demonstrations",  # the environment's own, or "module:function" of the same signature
    # In place of `source`: a file of JSON lines, a directory of them (`workdir/trajectories` of a run) or a glob
    # pattern; a line is {"messages": [...]} or a trajectory, see `training.conversation_files`.
    "path": "",
    "min_reward": None,  # least return of an episode that is imitated; None for any
    "only_success": False,  # imitate only what the environment calls a success
    "num_demonstrations": 4096,  # episodes to demonstrate
    "first_seed": 10_000,  # environment seed of the first one in run 0; run r begins r * num_demonstrations later
    "options": {},  # further arguments of the demonstrating function
    "heldout": 64,  # conversations that are measured, not trained on
    "rows": 16,  # rows of a batch
    "row_tokens": 512,  # tokens of a row
    "row_sampled": 0,  # imitated tokens of a row at most; 0 chooses from the data
    "steps": 200,
    "evaluate_every": 10,
    "stop_entropy": 0.0,  # nats a token on held-out conversations; 0 never stops early
    "num_microbatches": 1,
    "learning_rate": 1e-3,
    "schedule": "constant",
    "warmup_steps": 10,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "moment_dtype": "float32",
    "compute_dtype": "float32",
    "remat": "none",
    "attention": "auto",
    "head_chunk": 128,
}


@dataclasses.dataclass(frozen=True)
class WarmStartData:
    """Demonstrations ready to be trained on.

    Attributes:
      train: conversations to imitate.
      heldout: one batch of others; None where none were asked for.
      shape: of every batch.
      dropped: conversations that were too long for a row.
      selection: which conversations were kept, and how many were not.
      retokenised: conversations of trajectories whose text does not encode to the tokens that were sampled; they are
        imitated all the same.
    """

    train: list[demos.Demonstration]
    heldout: demos.DemonstrationBatch | None
    shape: demos.RowShape
    dropped: int
    selection: Selection
    retokenised: int


def sft_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """`SFT_DEFAULTS` with what `config.sft` says in their place.

    Raises:
      ValueError: a field that is none; the known ones are listed.
    """
    for name in given:
        if name not in SFT_DEFAULTS:
            raise ValueError(f"unknown field sft.{name}; known: {', '.join(sorted(SFT_DEFAULTS))}")
    return SFT_DEFAULTS | dict(given)


def supervised_config(sft: Mapping[str, Any]) -> SupervisedConfig:
    """The settings of the loop out of those of `sft_settings`."""
    optimizer_fields = {field.name for field in dataclasses.fields(OptimizerConfig)} & sft.keys()
    optimizer = OptimizerConfig(**{name: sft[name] for name in optimizer_fields}, total_steps=sft["steps"])
    fields = {field.name for field in dataclasses.fields(SupervisedConfig)} & sft.keys()
    return SupervisedConfig(optimizer=optimizer, **{name: sft[name] for name in fields})


def conversations(
    sft: Mapping[str, Any], env_id: str, env_kwargs: Mapping[str, Any], seed: int, selection: Selection | None = None
) -> Iterable[Conversation]:
    """The conversations that the settings ask for.

    Args:
      sft: of `sft_settings`.
      env_id: the environment that demonstrates.
      env_kwargs: its arguments.
      seed: of the run.
      selection: counts what is left out; None makes one of the settings.

    Raises:
      ValueError: an environment without demonstrations, a source that cannot be imported, a broken file.
    """
    selection = selection or Selection(sft["min_reward"], sft["only_success"])
    if sft["path"]:
        yield from read_conversations(sft["path"], selection)
        return
    source = sft["source"]
    if source == "demonstrations":
        if env_id not in DEMONSTRATIONS:
            raise ValueError(
                f"environment {env_id!r} has no demonstrations; known: {', '.join(DEMONSTRATIONS)}; "
                "set sft.path to a file, or sft.source to 'module:function'"
            )
        source = DEMONSTRATIONS[env_id]
    first = sft["first_seed"] + seed * sft["num_demonstrations"]
    seeds = range(first, first + sft["num_demonstrations"])
    for row in _function(source)(dict(env_kwargs), seeds, env_id=env_id, run_seed=seed, **dict(sft["options"])):
        if selection.keeps(row):
            yield Conversation(row["messages"])


def prepare(sft: Mapping[str, Any], chat: Chat, env_id: str, env_kwargs: Mapping[str, Any], seed: int) -> WarmStartData:
    """Demonstrations made or read, encoded, and split into held-out and training ones.

    Raises:
      ValueError: as `conversations`; nothing is left to train on.
    """
    selection = Selection(sft["min_reward"], sft["only_success"])
    found = list(conversations(sft, env_id, env_kwargs, seed, selection))
    if not found:
        raise ValueError(f"no conversation is left to imitate; {selection.line or 'there was none'}")
    everything = demos.encode_demonstrations(chat, [conversation.messages for conversation in found])
    retokenised = sum(not c.same_tokens(d.ids, chat) for c, d in zip(found, everything, strict=True))
    kept, dropped = demos.drop_long(everything, sft["row_tokens"])
    if len(kept) <= sft["heldout"]:
        raise ValueError(
            f"sft.heldout={sft['heldout']} leaves nothing to train on: there are {len(kept)} conversations"
        )
    sampled = sft["row_sampled"] or demos.sampled_capacity(kept, sft["row_tokens"])
    shape = demos.RowShape(sft["rows"], sft["row_tokens"], sampled)
    rows = list(demos.pack_rows(kept[: sft["heldout"]], shape))
    heldout = demos.make_batch(rows, dataclasses.replace(shape, rows=len(rows)), chat.pad_id) if rows else None
    return WarmStartData(kept[sft["heldout"] :], heldout, shape, dropped, selection, retokenised)


def warm_start(
    sft: Mapping[str, Any],
    params: Any,
    sizes: ModelSizes,
    chat: Chat,
    mesh: Mesh,
    *,
    env_id: str,
    env_kwargs: Mapping[str, Any],
    seed: int,
    report: Callable[[dict[str, float]], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Any, list[dict[str, float]]]:
    """Supervised training as `config.sft` describes it.

    Args:
      sft: `config.sft`; fields that it lacks take `SFT_DEFAULTS`.
      params: of the decoder.
      sizes: of the decoder.
      chat: of its tokenizer.
      mesh: from `make_mesh`.
      env_id: the environment that demonstrates.
      env_kwargs: its arguments.
      seed: of the run: which seeds are demonstrated, and the order of the data.
      report: called with each row of the history.
      say: called with a line about the conversations that were left out, if any.

    Returns:
      The parameters and the history of `train_supervised`; its rows also say `sft/demonstrations`,
      `sft/dropped`, `sft/retokenised` and `sft/left_out`.

    Raises:
      ValueError: a field of `sft` that is unknown or out of range, demonstrations that cannot be had.
    """
    sft = sft_settings(sft)
    config = supervised_config(sft)
    data = prepare(sft, chat, env_id, env_kwargs, seed)
    counts = {"sft/demonstrations": len(data.train), "sft/dropped": data.dropped, "sft/retokenised": data.retokenised}
    counts["sft/left_out"] = sum(data.selection.counts[reason] for reason in REASONS)
    if say and data.selection.line:
        say(data.selection.line)
    batches = demos.endless_batches(data.train, data.shape, seed, chat.pad_id)

    def report_with_counts(row):
        row |= counts
        if report is not None:
            report(row)

    return train_supervised(params, sizes, mesh, batches, config, heldout=data.heldout, report=report_with_counts)


def progress_line(row: Mapping[str, float], steps: int) -> str:
    """One readable line of a row of the history."""
    line = f"sft step {row['step']:>5}/{steps}"
    if "sft/loss" in row:
        line += f"  loss {row['sft/loss']:.3f}"
    line += f"  held-out loss {row['sft/heldout_loss']:.3f}"
    line += f"  accuracy {row['sft/accuracy']:.3f}  entropy {row['sft/entropy']:.3f}"
    if "sft/tokens_per_s" in row:
        line += f"  {row['sft/tokens_per_s']:,.0f} tokens/s  left {row['time/left_s']:.0f} s"
    return line + ("  (entropy floor reached)" if row.get("sft/stopped_by_entropy") else "")


def _function(source: str) -> Callable:
    module, _, name = source.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"sft.source={source!r} is neither 'demonstrations' nor 'module:function': {error}") from None
