"""The built-in tokenizer: one token per cell, action and tag, and any text there and back."""

import json
import random

import pytest

from turnppo_jax.rollout import builtin_tokenizer
from turnppo_jax.rollout.chat import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return builtin_tokenizer.build_tokenizer()


def _ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("##_", ["#", "#", "_"]),
        ("#_O√XPS\n", ["#", "_", "O", "√", "X", "P", "S", "\n"]),
        ("Up || Down||Left", ["Up", " || ", "Down", "||", "Left"]),
        ("<think>at 3</think><answer>Right</answer>",
         ["<think>", "at", " ", "3", "</think>", "<answer>", "Right", "</answer>"]),
        ("the player", ["the", " player"]),
        ("é", ["<0xC3>", "<0xA9>"]),
    ],
)  # fmt: skip
def test_text_is_cut_into_these_tokens(tokenizer, text, tokens):
    assert tokenizer.convert_ids_to_tokens(_ids(tokenizer, text)) == tokens


def test_size_and_ids(tokenizer):
    vocab = builtin_tokenizer.vocabulary()
    assert len(tokenizer) == len(vocab) < 400
    assert sorted(vocab.values()) == list(range(len(vocab)))
    assert [vocab[token] for token in builtin_tokenizer.CONTROL] == [0, 1, 2, 3, 4]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_words_of_a_game_get_tokens_behind_the_others(tokenizer):
    own = builtin_tokenizer.build_tokenizer(("light blue", "search", "the", ".99", "[back^"))
    assert own.convert_ids_to_tokens(_ids(own, "search[the light blue [back^599.99")) == [
        "search", "[", "the", " light blue", " [back^", "5", "9", "9", ".99",
    ]  # fmt: skip
    assert len(own) == len(tokenizer) + 8  # "the" is known
    assert own.get_vocab() | tokenizer.get_vocab() == own.get_vocab()
    text = "Search for a light  blue searchlight"
    assert own.decode(_ids(own, text)) == text


@pytest.mark.parametrize("word", ["", " red", "<|end|>"])
def test_words_that_cannot_be_tokens_are_refused(word):
    with pytest.raises(ValueError, match=r"model.words: .*; allowed: words without spaces around them"):
        builtin_tokenizer.build_tokenizer((word,))


def test_any_text_comes_back(tokenizer):
    letters = random.Random(0)
    texts = ["".join(chr(letters.choice((letters.randrange(128), letters.randrange(0x800), letters.randrange(0xD800),
                                         letters.randrange(0x10000, 0x110000)))) for _ in range(40))
             for _ in range(50)]  # fmt: skip
    for text in [*texts, " ", "\r\n\t\x00", "<0x41>", "� 🧱", "Upper  Downleft", ""]:
        assert tokenizer.decode(_ids(tokenizer, text)) == text


@pytest.mark.parametrize("model_type", [None, "qwen2", "qwen3", "llama"])
def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path, model_type):
    tokenizer.save_pretrained(tmp_path)
    if model_type:  # transformers chooses a class by this, and the one for qwen2 would replace the splitter
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 320}))
    loaded = load_tokenizer(tmp_path)
    text = "<|user|>##√\nUp || Down é<|end|>"
    assert _ids(loaded, text) == _ids(tokenizer, text)
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.pad_token_id, loaded.eos_token_id, len(loaded)) == (0, 1, len(tokenizer))


def test_chat_needs_three_tokens_a_turn(tokenizer):
    messages = [
        {"role": "user", "content": "#"},
        {"role": "assistant", "content": "Up"},
        {"role": "user", "content": "_"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>#<|assistant|>Up<|end|><|user|>_<|assistant|>"
