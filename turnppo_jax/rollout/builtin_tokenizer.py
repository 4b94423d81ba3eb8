"""A tokenizer of a few hundred ids for models that are trained from nothing on text games.

One token each for what such games are made of (cells, actions, tags, digits), for the other printable
ASCII characters, and for the bytes of everything else, so that any text goes there and back unchanged. A game with
texts of its own names their words, which get a token each too.
"""

import string
from collections.abc import Sequence

import tokenizers

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
CONTROL = (PAD, END, SYSTEM, USER, ASSISTANT)

# The longest wins where several match, so "Up || Down" is three tokens.
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_ACTIONS = ("Up", "Down", "Left", "Right", " || ", "||")
_CELLS = ("√",)  # the other cells (# _ O X P S) are single ASCII characters already
_WORDS = (
    *("player", "box", "target", "wall", "floor", "State", "Turn", "Reward", "You", "have", "action", "actions"),
    *("left", "right", "up", "down", "push", "move", "at", "row", "col", "to", "the", "is", "of", "in", "and"),
)
_ASCII = ("\n", *map(chr, range(0x20, 0x7F)))

# A message needs one token before it and, where the next header does not already end it, none after it.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def vocabulary(more_words: Sequence[str] = ()) -> dict[str, int]:
    """Token to id: control tokens, words, ASCII, the bytes that no character above stands for, then `more_words`.

    A word has two tokens: as it stands, and with a space before it.

    Raises:
      ValueError: a word that is empty, has spaces around it or is a control token.
    """
    for word in more_words:
        if not word or word != word.strip() or word in CONTROL:
            raise ValueError(f"model.words: {word!r}; allowed: words without spaces around them, no control tokens")
    words = dict.fromkeys((*_TAGS, *_ACTIONS, *_CELLS, *_WORDS, *(" " + word for word in (*_WORDS, *_ACTIONS[:4]))))
    byte_tokens = (f"<0x{byte:02X}>" for byte in range(256) if chr(byte) not in _ASCII)
    more = (token for word in more_words for token in (word, " " + word))
    tokens = dict.fromkeys((*CONTROL, *words, *_ASCII, *byte_tokens, *more))
    return {token: index for index, token in enumerate(tokens)}


def build_tokenizer(more_words: Sequence[str] = ()):
    """Builds the tokenizer as a transformers fast tokenizer, chat template included.

    Args:
      more_words: see `vocabulary`.

    `save_pretrained` writes a directory that `rollout.chat.load_tokenizer` reads. The control tokens are
    `CONTROL`; tags and words are ordinary vocabulary, so that they are encoded alike in any text.
    """
    import transformers  # two seconds of import, paid only where a tokenizer is built

    vocab = vocabulary(more_words)
    # No merges: the splitter below cuts the text into whole words and single characters, and a piece that
    # is in the vocabulary is taken as it stands (ignore_merges). What is not falls back to its bytes.
    model = tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True, ignore_merges=True)
    backend = tokenizers.Tokenizer(model)
    words = sorted((w for w in vocab if len(w) > 1 and w not in CONTROL and not w.startswith("<0x")), key=len)
    pattern = "|".join(map(_escape, reversed(words))) + r"|[\s\S]"
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _escape(word: str) -> str:
    """A literal in the regular expressions of the tokenizers library (Oniguruma)."""
    return "".join("\\" + character if character in string.punctuation else character for character in word)
