"""Episodes of two runs side by side as one HTML file that needs nothing beside itself."""

import html
from collections.abc import Mapping
from typing import Any

from turnppo_jax.comparison.pairs import Paired, Record, headline, numbers, shown, summary_line

_STYLE = """
:root { --line: #d0d7de; --soft: #f6f8fa; --text: #1f2328; --dim: #59636e; --good: #116329; --bad: #a40e26; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; --soft: #151b23; --text: #f0f6fc; --dim: #9198a1; --good: #3fb950; --bad: #f85149; }
  body { background: #0d1117; }
}
* { box-sizing: border-box; }
body { color: var(--text); font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1500px; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; } h3 { font-size: .95rem; margin: 0; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid var(--line); padding: .2rem .9rem .2rem 0; }
td { font-variant-numeric: tabular-nums; text-align: right; } th { text-align: left; }
.two { display: grid; gap: .7rem; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); margin: .5rem 0; }
.box { border: 1px solid var(--line); border-radius: 6px; overflow: hidden; padding: .5rem .7rem; }
.both { background: var(--soft); grid-column: 1 / 3; } .sees { background: var(--soft); }
pre { font: 13px/1.35 ui-monospace, monospace; margin: .2rem 0 .5rem; overflow-wrap: anywhere; white-space: pre-wrap; }
.label, .over { color: var(--dim); font-size: .8rem; } .turn { color: var(--dim); margin-top: 1rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
@media (max-width: 700px) { .two { grid-template-columns: minmax(0, 1fr); } .both { grid-column: 1; } }
"""


def to_html(paired: Paired) -> str:
    """The page: what both reach, a list of all pairs, then each pair turn by turn.

    Args:
      paired: of `comparison.pairs.pair`.
    """
    names = [_escaped(str(side.path)) for side in (paired.left, paired.right)]
    rows = "\n".join(
        f'<tr><th><a href="#pair{number}">seed {_escaped(str(left["seed"]))}</a></th>'
        + "".join(f"<td>{record['return']:.3f}</td><td>{_success(record)}</td>" for record in (left, right))
        + f"<td>{right['return'] - left['return']:+.3f}</td></tr>"
        for number, (left, right) in enumerate(paired.pairs, start=1)
    )
    sections = "\n".join(_section(number, *pair) for number, pair in enumerate(paired.pairs, start=1))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Episodes side by side</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Episodes side by side</h1>
<p>left: <b>{names[0]}</b><br>right: <b>{names[1]}</b></p>
<p>{_escaped(summary_line(paired))}</p>
<table>
<tr><th>goal</th><th>return left</th><th></th><th>return right</th><th></th><th>right − left</th></tr>
{rows}
</table>
{sections}
</body>
</html>
"""


def _section(number: int, left: Record, right: Record) -> str:
    parts = [f'<h2 id="pair{number}">seed {_escaped(str(left["seed"]))}</h2>', '<div class="two">']
    parts += [f"<h3>{_escaped(headline(record))}</h3>" for record in (left, right)]
    parts.append("</div>")
    for index in range(max(len(left["turns"]), len(right["turns"]))):
        turns = [record["turns"][index] if index < len(record["turns"]) else None for record in (left, right)]
        shared = None not in turns and turns[0]["observation"] == turns[1]["observation"]
        parts += [f'<div class="turn">turn {index + 1}</div>', '<div class="two">']
        if shared:
            parts.append(
                f'<div class="box both"><span class="label">both see</span>{_pre(turns[0]["observation"])}</div>'
            )
        parts += [_turn(turn, observation=not shared) for turn in turns]
        parts.append("</div>")
    return "\n".join(parts)


def _turn(turn: Mapping[str, Any] | None, *, observation: bool) -> str:
    if turn is None:
        return '<div class="over">the episode is over</div>'
    seen = f'<span class="label">sees</span>{_pre(turn["observation"])}' if observation else ""
    kind = "good" if turn["reward"] > 0 else "bad" if turn["reward"] < 0 else "label"
    done = f'<span class="label">does</span>{_pre(turn["action"])}<span class="{kind}">{_escaped(numbers(turn))}</span>'
    return f'<div class="box">{seen}{done}</div>'


def _success(record: Record) -> str:
    return '<span class="good">success</span>' if record["success"] else ""


def _pre(text: str) -> str:
    return f"<pre>{_escaped(text)}</pre>"


def _escaped(text: str) -> str:
    return html.escape(shown(text))
