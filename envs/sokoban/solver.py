"""The shortest solution of a room."""

import heapq
from collections import deque

from envs.sokoban import rules


def solve(room: rules.Room, *, max_nodes: int = 200_000) -> list[str] | None:
    """A shortest sequence of actions that solves the room.

    A* over (player, boxes). The estimate of what is left is the sum over boxes of the pushes to the
    nearest target in a room without other boxes; a move pushes at most one box by one cell, so the
    estimate is never too high, falls by at most one a move, and the first solution taken from the queue
    is shortest. A box from which no target can be reached prunes the position.

    Args:
      room: any room.
      max_nodes: positions to expand at most.

    Returns:
      Actions, [] for a solved room; None where there is no solution, or none within `max_nodes`.
    """
    steps = [rules.step_of(action, room.width) for action in rules.ACTIONS]
    walls = room.walls
    pushes = _push_distances(room, steps)
    if any(box not in pushes for box in room.boxes):
        return None
    targets = sum(1 << cell for cell in room.targets)
    boxes = sum(1 << cell for cell in room.boxes)
    start = (room.player, boxes)
    came_from: dict[tuple[int, int], tuple[tuple[int, int], int] | None] = {start: None}
    cost = {start: 0}
    estimate = sum(pushes[box] for box in room.boxes)
    # Ordered by the whole estimated length, then by what is left of it: deepest first among equals.
    queue = [(estimate, estimate, start)]
    closed = set()
    while queue:
        _, left, state = heapq.heappop(queue)
        if state in closed:
            continue
        player, boxes = state
        if boxes & ~targets == 0:
            return _path(came_from, state)
        if len(closed) >= max_nodes:
            return None
        closed.add(state)
        new_cost = cost[state] + 1
        for number, step in enumerate(steps):
            ahead = player + step
            new_boxes, new_left = boxes, left
            if boxes >> ahead & 1:
                behind = ahead + step
                if behind not in pushes or boxes >> behind & 1:
                    continue
                new_boxes = boxes ^ (1 << ahead) ^ (1 << behind)
                new_left = left - pushes[ahead] + pushes[behind]
            elif ahead in walls:
                continue
            new_state = (ahead, new_boxes)
            if new_cost < cost.get(new_state, 1 << 60):
                cost[new_state] = new_cost
                came_from[new_state] = (state, number)
                heapq.heappush(queue, (new_cost + new_left, new_left, new_state))
    return None


def _push_distances(room: rules.Room, steps: list[int]) -> dict[int, int]:
    """Pushes from each cell to its nearest target with no other box about; cells without a way are left out."""
    distances = dict.fromkeys(room.targets, 0)
    queue = deque(sorted(room.targets))
    while queue:
        cell = queue.popleft()
        for step in steps:
            # The box came from `source`, pushed by a player who stood one cell farther back.
            source, stood = cell - step, cell - 2 * step
            if source in room.walls or stood in room.walls or source in distances:
                continue
            distances[source] = distances[cell] + 1
            queue.append(source)
    return distances


def _path(came_from: dict, state: tuple[int, int]) -> list[str]:
    actions = []
    while came_from[state] is not None:
        state, number = came_from[state]
        actions.append(rules.ACTIONS[number])
    return actions[::-1]
