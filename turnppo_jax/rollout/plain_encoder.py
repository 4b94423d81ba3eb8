"""Text to token ids, such that text never turns into control tokens.

A tokenizer matches the spelling of its added tokens (`<|im_end|>`, `<think>`, ...) anywhere in the
text that it is given. For text from an environment that is a hole: an observation could end its own
message and open another one. `PlainEncoder` runs the tokenizer's model without any added token.
"""

import itertools
import re

import tokenizers

# Unicode noncharacters, which no text interchange may hold. It stands in for "a control token came
# before", so that tokenizers which treat the start of a text apart (SentencePiece puts a space there)
# encode a stretch in the middle of a conversation as they would in the middle of a whole text.
_ANCHOR = "\ufdd0\ufdd1"


class PlainEncoder:
    """Encodes plain text by the model of a transformers fast tokenizer, its added tokens left out.

    Args:
      tokenizer: a transformers tokenizer with a `tokenizers` backend.

    Raises:
      ValueError: the tokenizer has no `tokenizers` backend.
    """

    def __init__(self, tokenizer):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"tokenizer {type(tokenizer).__name__} has no `tokenizers` backend; it needs a tokenizer.json, or "
                "files that transformers converts to one (tokenizer.model, or vocab.json and merges.txt)"
            )
        self._added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
        self._natural = {
            token.content: index for index, token in tokenizer.added_tokens_decoder.items() if not token.special
        }
        self._added_pattern = _alternatives([*self._added, _ANCHOR])
        self._natural_pattern = _alternatives(self._natural)
        # The model object is shared, not copied; normalizer and pre-tokenizer are what the tokenizer uses.
        self._plain = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = backend.pre_tokenizer
        self._plain.add_special_tokens([tokenizers.AddedToken(_ANCHOR, special=True, normalized=False)])
        self._forbidden = set(self._added.values()) | {self._plain.token_to_id(_ANCHOR)}
        # What a model without byte fallback says for a character that it does not know is not a control token.
        unknown = getattr(backend.model, "unk_token", tokenizer.unk_token)
        if unknown in self._added and unknown not in (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token):
            self._forbidden.discard(self._added[unknown])

    def encode(self, text: str, *, first: bool = False) -> list[int]:
        """Ids of `text`, none of which belongs to an added token.

        Args:
          text: any text.
          first: the text begins the whole conversation (otherwise a control token came before it).

        Raises:
          ValueError: the tokenizer's model itself turns a single character into a control token.
        """
        if not text.isascii():  # a lone surrogate is no text that the tokenizer takes; it becomes U+FFFD
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = self._ids(text, first)
        if self._forbidden.isdisjoint(ids):
            return ids
        # Some models hold the spelling of a control token in their own vocabulary (Unigram does). Cutting
        # the spelling in two leaves only its ordinary parts.
        for pieces in (_cut(text, self._added_pattern), list(text)):
            ids = [token for i, piece in enumerate(pieces) for token in self._ids(piece, first and i == 0)]
            if self._forbidden.isdisjoint(ids):
                return ids
        raise ValueError(f"the tokenizer encodes the text {text[:80]!r} to a control token however it is cut")

    def encode_natural(self, text: str) -> list[int]:
        """Ids of text that the model itself might have sampled: added tokens that are no control tokens match.

        `<think>` of Qwen3 is such a token: a model writes it as one id, so demonstrations must as well.
        """
        ids = []
        for part in split_tokens(text, self._natural_pattern, self._natural):
            ids += [part] if isinstance(part, int) else self.encode(part)
        return ids

    def split(self, text: str) -> list[int | str]:
        """The text of a template, cut into ids of added tokens and the plain text between them."""
        return split_tokens(text, self._added_pattern, self._added)

    def encode_parts(self, parts: list[int | str]) -> list[int]:
        """Ids of a prompt given as control ids and plain text; neighbouring texts are encoded as one."""
        ids, text = [], ""
        for part in [*parts, None]:
            if isinstance(part, str):
                text += part
                continue
            if text:
                ids += self.encode(text, first=not ids)
                text = ""
            if part is not None:
                ids.append(part)
        return ids

    def _ids(self, text: str, first: bool) -> list[int]:
        if first:
            return self._plain.encode(text, add_special_tokens=False).ids
        return self._plain.encode(_ANCHOR + text, add_special_tokens=False).ids[1:]


def split_tokens(text: str, pattern: re.Pattern | None, ids: dict[str, int]) -> list[int | str]:
    """Cuts `text` at every match of `pattern` that `ids` knows; matches become ids, the rest stays text."""
    if pattern is None:
        return [text] if text else []
    return [ids.get(part, part) for part in pattern.split(text) if part]


def _alternatives(strings) -> re.Pattern | None:
    """A pattern with one group that matches any of the strings, the longest first."""
    ordered = sorted(strings, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None


def _cut(text: str, pattern: re.Pattern) -> list[str]:
    """Cuts `text` after the first character of every match."""
    starts = [0, *(match.start() + 1 for match in pattern.finditer(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(starts) if b > a]
