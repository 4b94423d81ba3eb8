"""Writes token_set_ratio.json: pairs of texts with the ratio that thefuzz 0.22.1 gives them.

    python -m tests.golden.make_token_set_ratio

Needs the package thefuzz, which the tests themselves do not.
"""

import json
import pathlib
import random

from thefuzz import fuzz

TEXT = """
long sleeve classic fit light blue dark navy x-large 3x-large size: color: 5.5 10 wide 12" x 18" (pack of 2)
2005black a-black men's women's non-slip gluten free café crème größe 1½ × 24inch 红色 ﬁt ＸＬ İstanbul ★ | & a A
"""
WORDS = TEXT.split()


def main() -> None:
    """Writes the file beside this one."""
    rng = random.Random(0)
    rows = []
    for _ in range(600):
        left = rng.choices(WORDS, k=rng.randint(0, 5))
        right = rng.choices(WORDS, k=rng.randint(0, 3)) + rng.sample(left, rng.randint(0, len(left)))
        rng.shuffle(right)
        left, right = " ".join(left), rng.choice([" ", "  ", "-", ", "]).join(right)
        if right and rng.random() < 0.3:  # a letter less
            place = rng.randrange(len(right))
            right = right[:place] + right[place + 1 :]
        rows.append([left, right, fuzz.token_set_ratio(left, right)])
    path = pathlib.Path(__file__).with_name("token_set_ratio.json")
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
