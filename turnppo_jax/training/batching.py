"""From trajectories to rows of fixed shape: numpy in, numpy out, the same for the same input.

A trajectory is cut into pieces where a turn begins a new row; a piece is one segment, and pieces are packed
first-fit decreasing under three capacities a row: tokens T, turns K, sampled tokens A. Pieces of one trajectory may
stand in different rows: whatever belongs to a trajectory goes through (trajectory_ids, turn_index).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from turnppo_jax.types import Trajectory, TrajectoryBatch


class PackingError(ValueError):
    """Trajectories that do not fit the shape; the message names both numbers and the field to change."""


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Sizes of a minibatch: one compiled shape for all of them.

    Attributes:
      rows: B. As many rows as pieces (trajectories, or turns with window prompts) always suffice; unused ones cost
        nothing but integers.
      tokens: T, the longest piece that fits.
      turns: K, turns a row.
      sampled: A, sampled tokens a row.
      trajectories: M, trajectories of the whole rollout.
      max_turns: K_max, turns of a trajectory.
      max_sampled: sampled tokens of a trajectory (over all its rows); 0 means A.
      micro_rows: rows that one forward and backward pass takes; divides `rows`.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """

    rows: int
    tokens: int
    turns: int
    sampled: int
    trajectories: int
    max_turns: int
    max_sampled: int = 0
    micro_rows: int = 1

    def __post_init__(self):
        if self.max_sampled == 0:
            object.__setattr__(self, "max_sampled", self.sampled)
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)}; allowed: at least 1")
        if self.rows % self.micro_rows:
            raise ValueError(f"rows={self.rows} is not a multiple of micro_rows={self.micro_rows}; change either")
        if self.sampled > self.tokens:
            raise ValueError(f"sampled={self.sampled} exceeds tokens={self.tokens}; change either")


@dataclasses.dataclass(frozen=True)
class PackingStats:
    """What packing made of the trajectories."""

    rows: int  # rows in use
    num_micro: int  # micro-batches that hold a row in use
    tokens: int  # tokens in use
    sampled: int  # sampled tokens
    turns: int  # turns that count
    padding_share: float  # of the tokens of the micro-batches in use, those that are padding
    empty_turns: int  # turns without a sampled token, merged into the turn before
    empty_trajectories: int  # trajectories without a sampled token, in no row
    lost_reward: float  # reward of turns without a sampled token that had no turn before
    missing_bootstraps: int  # truncated trajectories that should end with a value and have no prompt for it


def kept_turns(trajectory: Trajectory) -> tuple[list[int], list[float], float]:
    """Which turns count: those with a sampled token. The reward of the others goes to the turn before.

    Returns:
      (indices into `trajectory.turns`, reward of each, reward that no turn could take).
    """
    indices: list[int] = []
    rewards: list[float] = []
    lost = 0.0
    for index, turn in enumerate(trajectory.turns):
        if len(turn.response_ids):
            indices.append(index)
            rewards.append(float(turn.reward))
        elif rewards:
            rewards[-1] += float(turn.reward)
        else:
            lost += float(turn.reward)
    return indices, rewards, lost


@dataclasses.dataclass
class _Piece:
    """Tokens that must stand together in a row: one segment, or two where a bootstrap prompt stands alone."""

    trajectory: int
    segments: list[list[np.ndarray]]  # parts of each segment, in order
    starts: list[tuple[int, int, int, np.ndarray, float, bool]]  # turn index, column, length, logprobs, reward, last
    bootstrap: int = -1  # column of the last token of the unanswered prompt

    @property
    def tokens(self) -> int:
        return sum(len(part) for segment in self.segments for part in segment)

    @property
    def sampled(self) -> int:
        return sum(start[2] for start in self.starts)

    def cut_after(self, column: int) -> None:
        """Drops every token after `column`, which a critic that reads no later state need not see."""
        room = column + 1
        for number, segment in enumerate(self.segments):
            kept = []
            for part in segment:
                kept.append(part[:room])
                room -= len(kept[-1])
            self.segments[number] = kept


def _pieces(trajectory: Trajectory, number: int, bootstrap: bool) -> tuple[list[_Piece], float]:
    indices, rewards, lost = kept_turns(trajectory)
    if not indices:
        return [], lost
    pieces: list[_Piece] = []
    length = 0
    for index, turn in enumerate(trajectory.turns):
        if index == 0 or turn.starts_row:
            pieces.append(_Piece(number, [[]], []))
            length = 0
        piece = pieces[-1]
        piece.segments[0] += [turn.prompt_ids, turn.response_ids]
        length += len(turn.prompt_ids)
        if len(turn.response_ids):
            order = indices.index(index)
            if length == 0:
                raise PackingError(
                    f"trajectory {number} (episode {trajectory.episode}): turn {index} has no token before its "
                    "response, so nothing gives the value and the first log-prob; prompt_ids must not be empty"
                )
            last = order == len(indices) - 1
            piece.starts.append((order, length, len(turn.response_ids), turn.behavior_logprobs, rewards[order], last))
            length += len(turn.response_ids)
    final = trajectory.final_prompt_ids
    if bootstrap and trajectory.truncated and not trajectory.terminated and final is not None and len(final):
        piece = next(piece for piece in reversed(pieces) if piece.starts)
        # Where prompts are rendered anew each turn, so is the one that was never answered.
        renders_anew = any(turn.starts_row for turn in trajectory.turns) or piece is not pieces[-1]
        if renders_anew:
            piece.segments.append([final])
        else:
            piece.segments[0].append(final)
        piece.bootstrap = piece.tokens - 1
    return [piece for piece in pieces if piece.starts], lost


def pack(
    trajectories: Sequence[Trajectory],
    shape: BatchShape,
    *,
    members: Sequence[int] | None = None,
    bootstrap: bool = False,
    values_only: bool = False,
) -> tuple[TrajectoryBatch, PackingStats]:
    """Packs trajectories into one minibatch.

    Args:
      trajectories: of the whole rollout; a trajectory's id is its position here.
      shape: capacities.
      members: which of them to pack, all by default.
      bootstrap: append the unanswered prompt of truncated trajectories, for a bootstrap value.
      values_only: leave out what stands after the last state that a turn-level critic reads. Such rows
        serve the critic alone: the last turn's tokens, and with them its entries in `turn_ids`, are gone.

    Returns:
      (batch of numpy arrays, statistics). Turns without a sampled token are no decision units: their tokens
      stay as context, their reward goes to the turn before.

    Raises:
      PackingError: something does not fit; the message names the numbers and the field.
    """
    if len(trajectories) > shape.trajectories:
        raise PackingError(
            f"{len(trajectories)} trajectories exceed trajectories={shape.trajectories}; raise trajectories"
        )
    members = range(len(trajectories)) if members is None else members
    pieces: list[_Piece] = []
    empty_turns = empty_trajectories = missing_bootstraps = 0
    lost_reward = 0.0
    for number in members:
        trajectory = trajectories[number]
        indices, _, _ = kept_turns(trajectory)
        new, lost = _pieces(trajectory, number, bootstrap)
        lost_reward += lost
        empty_turns += len(trajectory.turns) - len(indices)
        empty_trajectories += not indices
        if bootstrap and trajectory.truncated and not trajectory.terminated:
            missing_bootstraps += not any(piece.bootstrap >= 0 for piece in new)
        _check_trajectory(trajectory, number, len(indices), new, shape)
        if values_only:
            for piece in new:
                piece.cut_after(max([start[1] - 1 for start in piece.starts] + [piece.bootstrap]))
        for piece in new:
            _check_piece(piece, trajectory, shape, values_only)
        pieces += new
    rows = _assign(pieces, shape, values_only)
    if max(rows, default=-1) >= shape.rows:
        raise PackingError(
            f"{len(pieces)} pieces of the minibatch need {max(rows) + 1} rows, but rows={shape.rows}; "
            "raise rows (or tokens, turns, sampled, which decide how many share a row)"
        )
    batch = _fill(pieces, rows, shape, values_only)
    groups = np.full(shape.trajectories, -1, np.int32)
    groups[: len(trajectories)] = [trajectory.group for trajectory in trajectories]
    used = max(rows, default=-1) + 1
    num_micro = -(-used // shape.micro_rows)
    tokens = int((batch["segment_ids"] > 0).sum())
    area = num_micro * shape.micro_rows * shape.tokens
    stats = PackingStats(
        rows=used,
        num_micro=num_micro,
        tokens=tokens,
        sampled=int((batch["turn_ids"] >= 0).sum()),
        turns=int(batch["turn_mask"].sum()),
        padding_share=1.0 - tokens / area if area else 0.0,
        empty_turns=empty_turns,
        empty_trajectories=empty_trajectories,
        lost_reward=lost_reward,
        missing_bootstraps=missing_bootstraps,
    )
    return TrajectoryBatch(**batch, group_ids=groups), stats


def _check_trajectory(trajectory: Trajectory, number: int, turns: int, pieces: list[_Piece], shape: BatchShape):
    who = f"trajectory {number} (episode {trajectory.episode})"
    if turns > shape.max_turns:
        raise PackingError(f"{who} has {turns} turns, but max_turns={shape.max_turns}; raise max_turns")
    sampled = sum(piece.sampled for piece in pieces)
    if sampled > shape.max_sampled:
        raise PackingError(
            f"{who} has {sampled} sampled tokens, but max_sampled={shape.max_sampled}; raise max_sampled"
        )


def _check_piece(piece: _Piece, trajectory: Trajectory, shape: BatchShape, values_only: bool):
    sizes = {"tokens": piece.tokens, "turns": len(piece.starts), "sampled": 0 if values_only else piece.sampled}
    for field, size in sizes.items():
        if size > getattr(shape, field):
            raise PackingError(
                f"trajectory {piece.trajectory} (episode {trajectory.episode}) needs {size} {field} in one row, "
                f"but {field}={getattr(shape, field)}; raise {field}"
            )


def _assign(pieces: list[_Piece], shape: BatchShape, values_only: bool) -> list[int]:
    """The row of each piece: first fit, longest first, equal lengths in the order given."""
    size = np.array([[p.tokens, len(p.starts), 0 if values_only else p.sampled] for p in pieces], np.int64).reshape(
        len(pieces), 3
    )
    room = np.tile(np.array([shape.tokens, shape.turns, shape.sampled]), (max(len(pieces), 1), 1))
    rows = [0] * len(pieces)
    for index in np.argsort(-size[:, 0], kind="stable"):
        row = int(np.argmax((room >= size[index]).all(axis=1)))  # a fresh row always has room
        room[row] -= size[index]
        rows[index] = row
    return rows


def _fill(pieces: list[_Piece], rows: list[int], shape: BatchShape, values_only: bool) -> dict[str, np.ndarray]:
    b, t, k, a = shape.rows, shape.tokens, shape.turns, shape.sampled
    batch = {
        "tokens": np.zeros((b, t), np.int32),
        "positions": np.zeros((b, t), np.int32),
        "segment_ids": np.zeros((b, t), np.int32),
        "turn_ids": np.full((b, t), -1, np.int32),
        "sampled_positions": np.full((b, a), -1, np.int32),
        "behavior_logprobs": np.zeros((b, t), np.float32),
        "value_positions": np.full((b, k), -1, np.int32),
        "turn_rewards": np.zeros((b, k), np.float32),
        "turn_mask": np.zeros((b, k), bool),
        "turn_last": np.zeros((b, k), bool),
        "trajectory_ids": np.full((b, k), -1, np.int32),
        "turn_index": np.full((b, k), -1, np.int32),
        "bootstrap_positions": np.full((b, k), -1, np.int32),
    }
    columns, turns, segments = (np.zeros(b, np.int64) for _ in range(3))
    for piece, row in zip(pieces, rows):
        begin = column = int(columns[row])
        for segment in piece.segments:
            ids = np.concatenate(segment) if segment else np.zeros(0, np.int32)
            end = column + len(ids)
            segments[row] += 1
            batch["tokens"][row, column:end] = ids
            batch["positions"][row, column:end] = np.arange(len(ids))
            batch["segment_ids"][row, column:end] = segments[row]
            column = end
        columns[row] = column
        for order, start, length, logprobs, reward, last in piece.starts:
            slot = int(turns[row])
            turns[row] += 1
            batch["value_positions"][row, slot] = begin + start - 1
            batch["turn_rewards"][row, slot] = reward
            batch["turn_mask"][row, slot] = True
            batch["turn_last"][row, slot] = last
            batch["trajectory_ids"][row, slot] = piece.trajectory
            batch["turn_index"][row, slot] = order
            if last and piece.bootstrap >= 0:
                batch["bootstrap_positions"][row, slot] = begin + piece.bootstrap
            if not values_only:
                where = slice(begin + start, begin + start + length)
                batch["turn_ids"][row, where] = slot
                batch["behavior_logprobs"][row, where] = logprobs
    if not values_only:
        for row in np.flatnonzero(turns):
            sampled = np.flatnonzero(batch["turn_ids"][row] >= 0)
            batch["sampled_positions"][row, : len(sampled)] = sampled
    return batch
