"""Hosts as threads of one process, for tests of what hosts say to each other: their collective is a barrier."""

import threading

import jax
import numpy as np
from jax.experimental import multihost_utils


class ThreadHosts:
    """`run(body)` calls body(index) once a host, at the same time, and returns (results, errors) by index.

    The shapes of the collectives of each host are in `collectives`: hosts that differ there would wait for ever.
    """

    def __init__(self, monkeypatch, count):
        self.count = count
        self.collectives = [[] for _ in range(count)]
        self._own = threading.local()
        self._barrier = threading.Barrier(count)
        self._parts = [None] * count
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(jax, "process_index", lambda: self._own.index)
        monkeypatch.setattr(multihost_utils, "process_allgather", self._gather)

    def _gather(self, part):
        index = self._own.index
        self.collectives[index].append(part.shape)
        self._parts[index] = part
        self._barrier.wait(timeout=20)
        everyone = np.stack(self._parts)
        self._barrier.wait(timeout=20)
        return everyone

    def run(self, body):
        results, errors = [None] * self.count, [None] * self.count

        def host(index):
            self._own.index = index
            try:
                results[index] = body(index)
            except Exception as error:
                errors[index] = error

        threads = [threading.Thread(target=host, args=(index,)) for index in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(shapes == self.collectives[0] for shapes in self.collectives)
        return results, errors
