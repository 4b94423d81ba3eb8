"""Small tokenizers made on the spot, shaped like those of the model families that are supported."""

import io
import json
import pathlib

import sentencepiece
import tokenizers
import transformers

# ChatML with a default system prompt, as Qwen2.5 has it: it appears whenever the first message is not a system one.
DEFAULT_SYSTEM = "Be of use to whoever asks."
QWEN25_LIKE = (
    "{% if messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>system\n" + DEFAULT_SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] != 'system' %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same within one loop, as SmolLM2 has it.
SMOLLM_LIKE = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + DEFAULT_SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = [
    *(f"Turn {i}:\nState:\n##__\n#P_O\n\nYou have {i} actions left.\n" for i in range(40)),
    *("<think>\npush the box\n</think>\n\n<answer>Up || Down</answer>\n" for _ in range(20)),
    *("system\nassistant\nuser\nBe of use to whoever asks.\n\n" for _ in range(20)),
]


def byte_level_tokenizer(template: str):
    """A byte-level BPE of 400 entries with ChatML control tokens and `<think>` as an ordinary added token."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_TEXT, trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def unigram_tokenizer(template: str):
    """A Unigram model whose own vocabulary holds the spelling of its end-of-text token, as SentencePiece's do."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((chr(code), -5.0) for code in (10, *range(32, 127)))]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def write_sentencepiece(directory: pathlib.Path) -> None:
    """A directory with a BPE tokenizer.model as SentencePiece writes it (Llama's kind), and no chat template."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_TEXT), model_writer=model, vocab_size=360, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **names}))
