"""The words that a tiny model's tokenizer gets for the built-in shop."""

from configs.webshop_quickstart import get_config
from envs.webshop.demonstrations import demonstrations
from envs.webshop.words import words
from turnppo_jax.rollout.builtin_tokenizer import build_tokenizer


def test_no_word_of_a_compact_episode_is_spelled_out():
    config = get_config()
    assert tuple(config.model.words) == words() == tuple(sorted(set(words())))
    tokenizer, longest = build_tokenizer(words()), 0
    for played in demonstrations(config.env.kwargs.to_dict(), range(200), **config.sft.options.to_dict()):
        tokens = [
            token
            for message in played["messages"]
            for token in tokenizer.convert_ids_to_tokens(tokenizer(message["content"])["input_ids"])
        ]
        spelled = [token for token in tokens if len(token) == 1 and token.isalpha() and token not in words()]
        assert not spelled, (spelled, played["messages"])
        longest = max(longest, len(tokens) + 2 * len(played["messages"]))
    assert 300 < longest <= config.sampler.context_length
