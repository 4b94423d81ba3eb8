"""BM25 with the rounding of Lucene: lengths in one byte, float32 terms.

    score(d, q) = Σ_t n_t · idf_t · (1 − 1 / (1 + f_td · u_d)),     1 / u_d = k1 (1 − b + b · length_d / mean length)
    idf_t = ln(1 + (N − df_t + ½) / (df_t + ½))

with f_td how often term t stands in document d, n_t how often in the query, and N the documents that have a term. The
customary factor (k1 + 1) is missing, as it is since Lucene 8. k1 and b are Anserini's.
"""

import math

import numpy as np

K1 = np.float32(0.9)
B = np.float32(0.4)
# Lucene's byte for a length: the first 24 stand for themselves, the others keep the four leading bits of what is above.
_EXACT = 24


def _decode(byte: int) -> int:
    if byte < _EXACT:
        return byte
    leading, shift = (byte - _EXACT) & 7, ((byte - _EXACT) >> 3) - 1
    return _EXACT + (leading if shift < 0 else (leading | 8) << shift)


# The length that each byte stands for, ascending.  [256]
LENGTHS = np.array([_decode(byte) for byte in range(256)], np.int64)


def quantised_lengths(lengths: np.ndarray) -> np.ndarray:
    """The byte of the longest length not above each of `lengths` [D] int; uint8 [D]."""
    return (np.searchsorted(LENGTHS, lengths, side="right") - 1).astype(np.uint8)


def inverse_norms(mean_length: float) -> np.ndarray:
    """The factor u for the length that each byte stands for; float32 [256]."""
    one = np.float32(1)
    return one / (K1 * ((one - B) + B * LENGTHS.astype(np.float32) / np.float32(mean_length)))


def term_weight(count: int, document_frequency: int, num_documents: int) -> np.float32:
    """n_t · idf_t."""
    idf = math.log(1 + (num_documents - document_frequency + 0.5) / (document_frequency + 0.5))
    return np.float32(count) * np.float32(idf)


def term_scores(weight: np.float32, occurrences: np.ndarray) -> np.ndarray:
    """The summand of one term from f · u [D] float32; float32 [D], not falling where f · u does not."""
    return weight - weight / (np.float32(1) + occurrences)
