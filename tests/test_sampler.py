"""Sampler and scheduler against the learner's forward pass, and against themselves under other timing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from turnppo_jax.models.decoder import bind, init_decoder
from turnppo_jax.models.head import token_logprobs
from turnppo_jax.models.sizes import SIZES
from turnppo_jax.parallel.mesh import MESH_AXES, make_mesh
from turnppo_jax.rollout.sampler import Sampler, SamplerSettings, Sampling, episode_keys
from turnppo_jax.rollout.scheduler import Scheduler
from turnppo_jax.types import StopReason

SIZES_HERE = dataclasses.replace(SIZES["tiny-qwen3"], vocab_size=64, num_token_ids=60)
EOS = (7,)
PLAIN = Sampling()
MESH = make_mesh()


@pytest.fixture(scope="module")
def params():
    return init_decoder(SIZES_HERE, jax.random.key(0))


def settings(**changes):
    return dataclasses.replace(
        SamplerSettings(num_slots=4, context_length=96, decode_chunk=4, prefill_chunk=16, prefill_rows=2), **changes
    )


def text_of(ids):
    return " ".join(str(i) for i in ids)


def converse(sampler, prompts, sampling=PLAIN, *, limit=12, stop_strings=(), slots=None, stagger=0):
    """Plays prompts[conversation][turn] and returns responses[conversation][turn].

    `slots` says which slot a conversation takes; `stagger` holds each conversation back for its number of
    rounds times this, so that slots fill and think at other times.
    """
    scheduler = Scheduler(sampler, sampling, text_of, stop_strings)
    keys = episode_keys(3, 0, 5, len(prompts))
    slots = slots or list(range(len(prompts)))
    owner = {slot: conversation for conversation, slot in enumerate(slots)}
    responses = [[] for _ in prompts]
    held = {c: c * stagger for c in range(len(prompts))}  # rounds to wait before the next prompt
    opened = set()
    while any(len(r) < len(p) for r, p in zip(responses, prompts, strict=True)):
        for c in list(held):
            if held[c] > 0:
                held[c] -= 1
                continue
            del held[c]
            if c not in opened:
                opened.add(c)
                scheduler.open(slots[c], keys[c])
            scheduler.extend(slots[c], prompts[c][len(responses[c])], limit)
        scheduler.launch()
        for response in scheduler.collect():
            c = owner[response.slot]
            responses[c].append(response)
            if len(responses[c]) < len(prompts[c]):
                held[c] = (c + 1) * stagger
    return responses


def some_prompts(turns=3, conversations=4, seed=0):
    rng = np.random.default_rng(seed)
    # First prompts of 3 to 21 tokens: below, at and beyond one piece of 16.
    lengths = [[(3, 16, 17, 21)[c % 4], *rng.integers(1, 6, turns - 1)] for c in range(conversations)]
    return [[rng.integers(8, 60, n).astype(np.int32) for n in row] for row in lengths]


def ids_of(responses):
    return [[response.ids.tolist() for response in row] for row in responses]


@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_behavior_logprobs_equal_the_learners_over_three_turns(params, temperature):
    sampler = Sampler(SIZES_HERE, MESH, settings(), EOS)
    sampler.set_params(params)
    prompts = some_prompts()
    responses = converse(sampler, prompts, Sampling(temperature=temperature, top_p=0.9))
    model = bind(params, SIZES_HERE)
    for prompt_row, response_row in zip(prompts, responses, strict=True):
        ids, columns, behavior = [], [], []
        for prompt, response in zip(prompt_row, response_row, strict=True):
            ids += prompt.tolist()
            columns += range(len(ids), len(ids) + len(response.ids))
            ids += response.ids.tolist()
            behavior += response.logprobs.tolist()
        tokens = jnp.asarray([ids], jnp.int32)
        positions = jnp.arange(len(ids), dtype=jnp.int32)[None]
        hidden = model.hidden_states(tokens, positions, jnp.ones_like(tokens))
        columns = np.asarray(columns)
        learner = token_logprobs(model, hidden[:, columns - 1], tokens[:, columns], temperature)[0]
        np.testing.assert_allclose(behavior, learner, atol=1e-4)  # the bar; float32 noise here is near 1e-6


def test_the_same_bits_for_every_chunk_size_slot_and_order_of_play(params):
    prompts = some_prompts()
    runs = []
    for changes, slots, stagger in [
        ({}, None, 0),
        ({"decode_chunk": 1}, None, 0),
        ({"decode_chunk": 16}, None, 0),
        ({}, [2, 0, 3, 1], 0),
        ({}, None, 3),
        ({"decode_chunk": 2}, [3, 1, 2, 0], 1),
    ]:
        sampler = Sampler(SIZES_HERE, MESH, settings(**changes), EOS)
        sampler.set_params(params)
        runs.append(converse(sampler, prompts, slots=slots, stagger=stagger))
    for run in runs[1:]:
        assert ids_of(run) == ids_of(runs[0])
        for row, first_row in zip(run, runs[0], strict=True):
            for response, first in zip(row, first_row, strict=True):
                np.testing.assert_array_equal(response.logprobs, first.logprobs)


def test_members_of_a_group_differ_and_a_second_run_repeats(params):
    sampler = Sampler(SIZES_HERE, MESH, settings(), EOS)
    sampler.set_params(params)
    same_prompt = [[np.arange(10, 15, dtype=np.int32)] for _ in range(4)]
    first, second = converse(sampler, same_prompt), converse(sampler, same_prompt)
    assert len({tuple(row[0].ids.tolist()) for row in first}) == 4
    assert ids_of(first) == ids_of(second)


def test_keys_are_a_function_of_seed_stream_step_and_episode():
    base = episode_keys(3, 0, 5, 4)
    np.testing.assert_array_equal(base, episode_keys(3, 0, 5, 8)[:4])
    for other in (episode_keys(4, 0, 5, 4), episode_keys(3, 1, 5, 4), episode_keys(3, 0, 6, 4)):
        assert not (base == other).all(axis=1).any()
    assert len({tuple(key) for key in base.tolist()}) == 4


def test_a_turn_ends_at_its_limit_and_a_context_at_its_end(params):
    sampler = Sampler(SIZES_HERE, MESH, settings(context_length=64, decode_chunk=16), (63,))  # 63 is never drawn
    sampler.set_params(params)
    [[response]] = converse(sampler, [[np.full(10, 9, np.int32)]], limit=20)
    assert (len(response.ids), response.stop) == (20, StopReason.TURN_LIMIT)
    # Window 64, prompt 40, limit 32: at most 24 new tokens.
    [[response]] = converse(sampler, [[np.full(40, 9, np.int32)]], limit=32)
    assert (len(response.ids), response.stop) == (24, StopReason.CONTEXT_LIMIT)
    scheduler = Scheduler(sampler, Sampling(), text_of)
    scheduler.open(0, np.zeros(2))
    with pytest.raises(ValueError, match="a prompt of 64 with room for 64"):
        scheduler.extend(0, np.full(64, 9, np.int32), 1)


def test_end_of_turn_ids_end_a_response_and_are_kept(params):
    sampler = Sampler(SIZES_HERE, MESH, settings(decode_chunk=16), tuple(range(8, 60, 2)))
    sampler.set_params(params)
    responses = converse(sampler, some_prompts(turns=2), limit=40)
    for row in responses:
        for response in row:
            assert response.stop == StopReason.EOS
            assert [i for i in response.ids if i in sampler.eos_ids] == [response.ids[-1]]


def test_ids_that_no_token_has_are_never_drawn(params):
    sampler = Sampler(SIZES_HERE, MESH, settings(decode_chunk=16), (63,))
    sampler.set_params(params)
    drawn = np.concatenate([r.ids for row in converse(sampler, some_prompts(), limit=20) for r in row])
    assert drawn.max() < SIZES_HERE.num_token_ids


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_a_stop_string_cuts_what_was_drawn_beyond_it_and_the_next_turn_does_not_see_it(params, chunk):
    sampler = Sampler(SIZES_HERE, MESH, settings(decode_chunk=chunk), (63,))
    sampler.set_params(params)
    prompt = np.arange(10, 20, dtype=np.int32)
    [[whole]] = converse(sampler, [[prompt]], limit=16)
    stop = text_of(whole.ids[4:6])  # completed by the sixth token
    [[cut, after]] = converse(sampler, [[prompt, np.asarray([11, 12], np.int32)]], limit=16, stop_strings=(stop,))
    assert cut.stop == StopReason.STOP_STRING
    end = text_of(whole.ids).split(stop)[0].count(" ") + 2
    assert cut.ids.tolist() == whole.ids[:end].tolist()
    # The next turn, in a context that never held more than the kept tokens.
    context = np.concatenate([prompt, cut.ids, [11, 12]]).astype(np.int32)
    [[fresh]] = converse(sampler, [[context]], limit=16, stop_strings=(stop,))
    assert fresh.ids.tolist() == after.ids.tolist()


def test_new_weights_leave_nothing_of_the_old(params):
    other = init_decoder(SIZES_HERE, jax.random.key(1))
    prompts, greedy = some_prompts(), Sampling(temperature=0.0)
    sampler = Sampler(SIZES_HERE, MESH, settings(), EOS)
    sampler.set_params(params)
    before = ids_of(converse(sampler, prompts, greedy))
    sampler.set_params(other)
    fresh = Sampler(SIZES_HERE, MESH, settings(), EOS)
    fresh.set_params(other)
    after = ids_of(converse(sampler, prompts, greedy))
    assert after == ids_of(converse(fresh, prompts, greedy)) != before


def test_lengths_budgets_and_temperatures_compile_nothing_new(params):
    sampler = Sampler(SIZES_HERE, MESH, settings(prefill_chunk=32), EOS)
    sampler.set_params(params)
    rng = np.random.default_rng(0)
    for limit, temperature in [(3, 1.0), (9, 0.5), (12, 1.3), (5, 0.0)]:
        prompts = [[rng.integers(8, 60, rng.integers(17, 50)).astype(np.int32)] for _ in range(4)]
        converse(sampler, prompts, Sampling(temperature=temperature, top_p=0.9), limit=limit)
    assert sampler.num_programs == 3  # one decode, prefill buckets 16 and 32


def test_what_cannot_be_is_refused_by_name(params):
    with pytest.raises(ValueError, match="prefill_chunk must be a power of two of at least 16, got 48"):
        SamplerSettings(num_slots=1, context_length=8, prefill_chunk=48)
    with pytest.raises(ValueError, match="num_slots must be at least 1, got 0"):
        SamplerSettings(num_slots=0, context_length=8)
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 0"):
        Sampling(top_p=0)
    with pytest.raises(ValueError, match="unknown cache attention 'block'; known: blocks"):
        settings(attention="block")
    four = jax.sharding.AbstractMesh((2, 2, 2, 1), MESH_AXES)
    assert settings(num_slots=8).data_shards(four) == 4
    with pytest.raises(ValueError, match=r"sampler.num_slots=6; allowed: a multiple of 4, .* \(data=2, fsdp=2\)"):
        settings(num_slots=6).data_shards(four)
    sampler = Sampler(SIZES_HERE, MESH, settings(), EOS)
    with pytest.raises(ValueError, match="set_params first"):
        sampler.decode(*[None] * 4, Sampling())
    sampler.set_params(params)
    sampler.prefill(np.zeros(4, np.int32), np.full(2, -1), np.zeros((2, 16), np.int32), np.zeros(2, np.int32))
    sampler.release()
    with pytest.raises(ValueError, match="set_params first"):
        sampler.decode(*[None] * 4, Sampling())
