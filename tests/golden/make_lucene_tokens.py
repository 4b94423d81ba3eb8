"""Writes lucene_tokens.json: the tokens of Lucene's English analyzer for each character of Unicode 12.1, and for texts.

    python3.8 tests/golden/make_lucene_tokens.py anserini-0.22.1-fatjar.jar

Needs that version of Python, whose `unicodedata` is of Unicode 12.1 as Lucene's tables are, a JDK of 11 or later and
the jar, which lies in the package pyserini 0.22.1. The tests need none of them.

A character's class is how three texts come out that hold it, written "@": between letters, between digits, and on its
own. Texts go in lower case, as the shop gives them to Lucene.
"""

import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unicodedata

JAVA = """
import io.anserini.analysis.*; import java.io.*; import java.nio.charset.StandardCharsets; import java.nio.file.*;
public class Tokens {
  public static void main(String[] paths) throws Exception {
    var analyzer = DefaultEnglishAnalyzer.newDefaultInstance();
    var text = Files.readString(Path.of(paths[0]), StandardCharsets.UTF_8);
    try (var out = new PrintWriter(paths[1], StandardCharsets.UTF_8)) {
      for (String line : text.split("\\n", -1))
        out.print(String.join("\\0", AnalyzerUtils.analyze(analyzer, line)) + "\\n");
    }
  }
}
"""
SURROUNDINGS = ("xq{}zk", "1{}2", "xq {} zk")
# Drawn often: what the rules name one by one.
SPECIAL = "a1b2 '\".,:;_-\u200d\ufe0f\ufe0e\u20e3#*\u0301\u202f\u3030カひ漢ー한ไาשא٠߸👍🏽🇩🇪❤"


def analysed(jar, texts):
    """The tokens of each text, none of which holds a line feed."""
    with tempfile.TemporaryDirectory() as folder:
        source, given, found = (pathlib.Path(folder) / name for name in ("Tokens.java", "texts", "tokens"))
        source.write_text(JAVA, encoding="utf-8")
        given.write_bytes("\n".join(texts).encode())
        subprocess.run(["java", "-cp", jar, str(source), str(given), str(found)], check=True)
        lines = found.read_bytes().decode().split("\n")[:-1]
    return [line.split("\0") if line else [] for line in lines]


def ranges(codes):
    """Ascending numbers as text: "a-b c-d", hexadecimal, both ends included."""
    ends = []
    for code in codes:
        if ends and code == ends[-1][1] + 1:
            ends[-1][1] = code
        else:
            ends.append([code, code])
    return " ".join(f"{first:x}-{last:x}" for first, last in ends)


def random_texts(known, count):
    """Short texts, of characters that rules name and of others, every general category as often as the next."""
    draws = random.Random(0)
    kinds = {}
    for character in known:
        kinds.setdefault(unicodedata.category(character), []).append(character)
    kinds = [kinds[name] for name in sorted(kinds)]
    texts = []
    while len(texts) < count:
        length = draws.randint(1, 9)
        drawn = [draws.choice(SPECIAL if draws.random() < 0.6 else draws.choice(kinds)) for _ in range(length)]
        text = "".join(drawn).lower()
        # What starts with a mark right after a joiner is the known difference, see tokens.py.
        joiner = any(unicodedata.category(character) == "Pc" or character == "\u202f" for character in text)
        if not joiner and text.isprintable():
            texts.append(text)
    return texts


def main():
    """Writes the file beside this one."""
    if unicodedata.unidata_version != "12.1.0":
        sys.exit(f"unicodedata is of Unicode {unicodedata.unidata_version}; needs 12.1.0, that of Python 3.8")
    known = [chr(code) for code in range(0x80, 0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]
    around = [surrounding.format(character.lower()) for character in known for surrounding in SURROUNDINGS]
    texts = random_texts(known, 1000)
    tokens = analysed(sys.argv[1], around + texts)
    classes = {}
    for place, character in enumerate(known):
        found = tokens[len(SURROUNDINGS) * place :][: len(SURROUNDINGS)]
        shape = json.dumps([[piece.replace(character.lower(), "@") for piece in pieces] for pieces in found])
        classes.setdefault(shape, []).append(ord(character))
    pairs = zip(texts, tokens[len(around) :])
    golden = {
        "surroundings": SURROUNDINGS,
        "characters": [[json.loads(shape), ranges(codes)] for shape, codes in classes.items()],
        "texts": list(pairs),
    }
    path = pathlib.Path(__file__).with_name("lucene_tokens.json")
    path.write_text(json.dumps(golden) + "\n", encoding="ascii")
    print(f"{len(known)} characters in {len(classes)} classes, {len(texts)} texts")


if __name__ == "__main__":
    main()
