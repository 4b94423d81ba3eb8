"""The jitted sampler: slots with a persistent key/value cache, prefill of new tokens, decoding in chunks.

A slot holds one conversation. Its context is `lengths[slot]` cached tokens plus one `pending` token that
is known but not cached yet; decoding feeds the pending token and draws the next one, so that prefill
needs no head and the first token of a response is drawn like every other. The host owns lengths and
pending tokens and passes them in with each call: cutting a context back is changing a number.

Two programs, made by factories of (sizes, mesh, settings) and lowerable from shapes alone:
`make_prefill` appends tokens for a few slots, `make_decode` draws up to `decode_chunk` tokens for all.
No shape depends on what other slots do: a prompt's bucket depends on its own length, decode always has
`S` rows. The random number of a token is folded from (episode key, row, position).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from turnppo_jax.models.cache import Cache, cache_shardings, init_cache, truncate
from turnppo_jax.models.cache_attention import cache_attention_by_name
from turnppo_jax.models.decoder import bind
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.mesh import platform
from turnppo_jax.parallel.sharding import RULES, constrain
from turnppo_jax.rollout.sampling import sample_tokens

_SMALLEST_BUCKET = 16


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """Shapes and precision of the sampler.

    Attributes:
      num_slots: `S`, conversations held at once.
      context_length: `C`, tokens a conversation may have.
      decode_chunk: tokens drawn a call at most, between two looks at the environments.
      prefill_chunk: tokens a prompt may have in one prefill; a longer one goes in pieces. Power of two.
      prefill_rows: prompts of one bucket that share a prefill call, on each data shard of the mesh.
      compute_dtype: "float32" or "bfloat16".
      attention: of new tokens to the cache, a key of `models.cache_attention.CACHE_ATTENTION`, or "auto": "ragged" on
        TPUs, else "blocks".
    """

    num_slots: int
    context_length: int
    decode_chunk: int = 8
    prefill_chunk: int = 256
    prefill_rows: int = 4
    compute_dtype: str = "float32"
    attention: str = "auto"

    def __post_init__(self):
        for name in ("num_slots", "context_length", "decode_chunk", "prefill_chunk", "prefill_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampler.{name} must be at least 1, got {getattr(self, name)}")
        if self.prefill_chunk < _SMALLEST_BUCKET or self.prefill_chunk & (self.prefill_chunk - 1):
            raise ValueError(
                f"sampler.prefill_chunk must be a power of two of at least {_SMALLEST_BUCKET}, got {self.prefill_chunk}"
            )
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"sampler.compute_dtype must be float32 or bfloat16, got {self.compute_dtype}")
        if self.attention != "auto":
            cache_attention_by_name(self.attention)

    def bucket(self, num_tokens: int) -> int:
        """Padded length of a prefill of `num_tokens`, which must be at most `prefill_chunk`."""
        return max(_SMALLEST_BUCKET, 1 << (num_tokens - 1).bit_length())

    def cache_attention(self, mesh: Mesh) -> str:
        """The key of `CACHE_ATTENTION` for the devices of a mesh."""
        if self.attention != "auto":
            return self.attention
        return "ragged" if platform(mesh) == "tpu" else "blocks"

    def data_shards(self, mesh: Mesh) -> int:
        """Parts that the mesh splits the slots into; each prefills rows for its own.

        Raises:
          ValueError: they do not divide `num_slots`.
        """
        shards = math.prod(mesh.shape[name] for name in RULES["slots"])
        if self.num_slots % shards:
            raise ValueError(
                f"sampler.num_slots={self.num_slots}; allowed: a multiple of {shards}, the data shards of the mesh "
                f"that samples ({', '.join(f'{name}={mesh.shape[name]}' for name in RULES['slots'])})"
            )
        return shards


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. All traced: changing one compiles nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0 (0 = greedy), got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 = all tokens), got {self.top_k}")


def make_prefill(sizes: ModelSizes, mesh: Mesh, settings: SamplerSettings):
    """Program `prefill(params, cache, lengths, slots, tokens, counts) -> cache`.

    lengths [S] int32 cached tokens of each slot; slots [R] int32, -1 for an unused row; tokens [R, P]
    int32; counts [R] int32 tokens of each row. `R` is `prefill_rows` for each data shard of the mesh, in order of the
    shards: `prefill_rows` rows of the first one's slots, then those of the second. The cache is donated.

    Raises:
      ValueError: `num_slots` that the data shards do not divide.
    """
    settings.data_shards(mesh)
    dtype = jnp.dtype(settings.compute_dtype)

    def prefill(params, cache, lengths, slots, tokens, counts):
        slots, tokens, counts = (constrain(x, ("rows",), mesh) for x in (slots, tokens, counts))
        cache = bind(params, sizes, mesh).prefill(truncate(cache, lengths), slots, tokens, counts, compute_dtype=dtype)
        return _in_place(cache, mesh)

    return jax.jit(prefill, donate_argnums=1)


def make_decode(sizes: ModelSizes, mesh: Mesh, settings: SamplerSettings):
    """Program `decode(params, cache, lengths, pending, budgets, keys, eos_ids, sampling) -> (cache, tokens, logprobs)`.

    Draws up to `decode_chunk` tokens for each slot with a budget left; a slot stops at an end-of-turn id
    or when its budget is used, and the call ends when all have stopped.

    lengths, pending, budgets [S] int32 (budget 0: the slot rests); keys [S, 2] uint32, the key data of
    each slot's row; eos_ids [E] int32; sampling = (temperature, top_p, top_k) scalars. Returns tokens
    and logprobs [S, decode_chunk], of which the host reads as many as the slot drew: tokens are -1
    after the last. The cache is donated.

    On a mesh the rows of one data shard of slots are drawn by the devices that share it, each for its part of the
    rows over the whole vocabulary (the logits are exchanged all-to-all), so that a row's numbers are summed as on
    one device. Where tensor does not divide a shard's rows, each device gathers the logits of all of them.

    Raises:
      ValueError: `num_slots` that the data shards do not divide.
    """
    settings.data_shards(mesh)
    dtype = jnp.dtype(settings.compute_dtype)
    chunk, num_slots = settings.decode_chunk, settings.num_slots

    def decode(params, cache, lengths, pending, budgets, keys, eos_ids, sampling):
        model = bind(params, sizes, mesh)
        temperature, top_p, top_k = sampling
        draw = jax.vmap(lambda key, position: jax.random.uniform(jax.random.fold_in(key, position)))
        keys = jax.random.wrap_key_data(keys)

        def going(carry):
            step, _, _, left, *_ = carry
            return (step < chunk) & jnp.any(left > 0)

        def one_token(carry):
            step, cache, pending, left, tokens, logprobs = carry
            active = left > 0
            hidden, cache = model.decode(cache, pending, active, compute_dtype=dtype)
            logits = constrain(model.logits(hidden), ("draws",), mesh)
            drawn, drawn_logprobs = sample_tokens(
                logits, draw(keys, cache.lengths), temperature=temperature, top_p=top_p, top_k=top_k
            )
            drawn, drawn_logprobs = (constrain(x, ("rows",), mesh) for x in (drawn, drawn_logprobs))
            tokens = tokens.at[:, step].set(jnp.where(active, drawn, -1))
            logprobs = logprobs.at[:, step].set(jnp.where(active, drawn_logprobs, 0.0))
            ended = jnp.any(drawn[:, None] == eos_ids[None, :], axis=-1)
            left = jnp.where(active & ~ended, left - 1, 0)
            return step + 1, cache, jnp.where(active, drawn, pending), left, tokens, logprobs

        start = (
            jnp.int32(0),
            truncate(cache, lengths),
            constrain(pending, ("rows",), mesh),
            constrain(budgets, ("rows",), mesh),
            constrain(jnp.full((num_slots, chunk), -1, jnp.int32), ("rows",), mesh),
            constrain(jnp.zeros((num_slots, chunk), jnp.float32), ("rows",), mesh),
        )
        _, cache, _, _, tokens, logprobs = jax.lax.while_loop(going, one_token, start)
        # Whole on every device: the host reads them.
        return _in_place(cache, mesh), constrain(tokens, (), mesh), constrain(logprobs, (), mesh)

    return jax.jit(decode, donate_argnums=1)


def _in_place(cache: Cache, mesh: Mesh) -> Cache:
    """The cache where the next call expects it, and where the donated one lay."""
    return jax.lax.with_sharding_constraint(cache, cache_shardings(mesh, cache))


def make_empty_cache(sizes: ModelSizes, mesh: Mesh, settings: SamplerSettings):
    """Program `empty_cache() -> cache`, each device making its own part."""
    settings.data_shards(mesh)

    def empty_cache():
        dtype, attention = jnp.dtype(settings.compute_dtype), settings.cache_attention(mesh)
        return init_cache(sizes, settings.num_slots, settings.context_length, dtype, mesh, attention)

    return jax.jit(empty_cache, out_shardings=cache_shardings(mesh, jax.eval_shape(empty_cache)))


@functools.partial(jax.jit, static_argnums=2)
def _fold_keys(seed, indices, num):
    """Key data [num, 2] uint32 of `num` episodes, folded from a seed and a list of stream indices."""
    key = jax.random.key(seed)
    for index in indices:
        key = jax.random.fold_in(key, index)
    return jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(jnp.arange(num))


def episode_keys(seed: int, stream: int, step: int, num_episodes: int) -> np.ndarray:
    """Key data [num_episodes, 2] uint32, a pure function of (seed, stream, step, episode)."""
    return folded_keys(seed, (stream, step), num_episodes)


def folded_keys(seed: int, indices: Sequence[int], num: int) -> np.ndarray:
    """Key data [num, 2] uint32, a pure function of (seed, *indices, 0..num-1)."""
    return np.asarray(_fold_keys(np.uint32(seed), tuple(map(np.uint32, indices)), num))


class Sampler:
    """Holds the cache and the compiled programs; knows slots, nothing of environments or text.

    Args:
      sizes: of the model.
      mesh: of the devices that sample.
      settings: shapes and precision.
      eos_ids: what ends a response.

    Raises:
      ValueError: no end-of-turn id, or `num_slots` that the data shards of the mesh do not divide.
    """

    def __init__(self, sizes: ModelSizes, mesh: Mesh, settings: SamplerSettings, eos_ids: tuple[int, ...]):
        if not eos_ids:
            raise ValueError("the sampler needs at least one end-of-turn id, got none")
        self.settings = settings
        self.sizes = sizes
        self.data_shards = settings.data_shards(mesh)
        self._prefill = make_prefill(sizes, mesh, settings)
        self._decode = make_decode(sizes, mesh, settings)
        self._empty_cache = make_empty_cache(sizes, mesh, settings)
        self.eos_ids = np.asarray(eos_ids, np.int32)
        self._cache = None
        self._params = None

    def set_params(self, params) -> None:
        """The weights that sample from here on. Whoever changes weights restarts its conversations."""
        self._params = params

    def release(self) -> None:
        """Lets go of weights and cache until the next `set_params`; conversations end with it."""
        self._params = self._cache = None

    @property
    def num_programs(self) -> int:
        """Compiled programs so far: one decode and one prefill a bucket, whatever is sampled."""
        return self._prefill._cache_size() + self._decode._cache_size()

    def prefill(self, lengths, slots, tokens, counts) -> None:
        """Appends tokens to a few slots (see make_prefill).

        Raises:
          ValueError: a row that does not stand on the data shard of its slot.
        """
        shard_slots, rows = self.settings.num_slots // self.data_shards, self.settings.prefill_rows
        for row, slot in enumerate(slots):
            if slot >= 0 and slot // shard_slots != row // rows:
                raise ValueError(f"row {row} of a prefill holds slot {slot}; allowed: slots of its own data shard")
        self._cache = self._prefill(self._params, self._ready_cache(), lengths, slots, tokens, counts)

    def decode(self, lengths, pending, budgets, keys, sampling: Sampling):
        """Draws a chunk for all slots (see make_decode); returns device arrays, not waited for."""
        numbers = (np.float32(sampling.temperature), np.float32(sampling.top_p), np.int32(sampling.top_k))
        self._cache, tokens, logprobs = self._decode(
            self._params, self._ready_cache(), lengths, pending, budgets, keys, self.eos_ids, numbers
        )
        return tokens, logprobs

    def _ready_cache(self):
        if self._params is None:
            raise ValueError("the sampler has no weights yet: call set_params first")
        if self._cache is None:
            self._cache = self._empty_cache()
        return self._cache
