# SPDX-License-Identifier: Apache-2.0
"""The study's numbers as sections of text and tables: on the console, as Markdown and as one HTML file."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import isinf, isnan
from pathlib import Path
from typing import Any

from vllm_targetrows.report import align
from vllm_targetrows.study.bootstrap import Estimate
from vllm_targetrows.study.estimates import RULES, telling_sets
from vllm_targetrows.study.quantities import BUDGETS, LONG, REPORTED
from vllm_targetrows.study.reranking import METHODS

SHOWN = (1, 2, 4, 8, 16, 32, 59, BUDGETS)
"""Node budgets in the tables; ``study.json`` has all."""
METHOD = (
    "A value is the mean over prompts of each prompt's mean over its rounds; brackets are 95 % intervals from"
    " {bootstrap} resamples of the prompts (seed {seed}). Rules are given a pool that the drafter had grown, and P(v)"
    " is the product of the target's probabilities along the path to a node v, so the numbers are expectations over"
    " what the target would have drawn. B is the node budget. Paper: arXiv 2610.29210; its figures are for other"
    " models and are set beside ours for their direction."
)


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column is a name."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """One quantity: what it is, what the paper found, and our numbers."""

    title: str
    text: str
    paper: str | None = None
    tables: Sequence[Table] = ()
    charts: Sequence[str] = ()
    notes: Sequence[str] = field(default_factory=list)


Chapter = tuple[dict[str, Any], list[Section], Mapping[str, Path]]
"""A group's numbers, its sections and its charts' files."""


def over(ratio: Estimate) -> str:
    """A ratio as the percentage above one."""
    if isnan(ratio.value):
        return "-"
    value, low, high = ((part - 1) * 100 for part in (ratio.value, ratio.low, ratio.high))
    return f"{value:+.1f} % [{low:+.1f}, {high:+.1f}]"


def share(part: Estimate, digits: int = 1) -> str:
    """A share as a percentage."""
    if isnan(part.value):
        return "-"
    value, low, high = (each * 100 for each in (part.value, part.low, part.high))
    return f"{value:.{digits}f} % [{low:.{digits}f}, {high:.{digits}f}]"


def _count(nodes: Estimate, most: int) -> str:
    value, low, high = (f"> {most}" if isinf(each) else f"{each:.0f}" for each in (nodes.value, nodes.low, nodes.high))
    return f"{value} [{low}, {high}]"


def sections(numbers: dict[str, Any]) -> list[Section]:
    """A group's sections.

    Args:
        numbers: of ``estimates.study``, with the reranker's under ``reranker``.
    """
    return [section(numbers) for section in _SECTIONS if section is not _reranker or "reranker" in numbers]


def _engine(numbers: dict[str, Any]) -> Section:
    engine = numbers["engine"]
    title = "Does the recording agree with the engine?"
    text = (
        "The trees that the engine really verified were expected to accept the sum of their P(v), given the drawn token"
        " where there was one; over many rounds it must have accepted as many."
    )
    if not engine["rounds"]:
        return Section(title, text, notes=["No round has a verified tree, so this was not checked."])
    table = Table(
        ["", "tokens a round"], [[each, engine[each].text(".4f")] for each in ("expected", "accepted", "difference")]
    )
    verdict = (
        "The difference's interval holds 0: the recording agrees with the engine."
        if engine["agrees"]
        else "**The difference's interval does not hold 0: recorded probabilities and verification disagree.**"
    )
    return Section(title, text, tables=[table], notes=[f"{engine['rounds']} rounds. {verdict}"])


def _accepted(numbers: dict[str, Any]) -> Section:
    names = {"top_first": "root_draw, top token"}
    table = Table(
        ["B", *(names.get(rule, rule) for rule in RULES)],
        [[str(b), *(numbers["accepted"][rule][b - 1].text() for rule in RULES)] for b in SHOWN],
    )
    nodes = Table(
        ["mean verified nodes, B", "root_draw", "pearl"],
        [[str(b), *(numbers["nodes"][rule][b - 1].text(".2f") for rule in ("root_draw", "pearl"))] for b in SHOWN],
    )
    return Section(
        "Expected accepted tokens",
        "How many tokens of a rule's tree verification accepts on average. root_draw and pearl count the drawn token as"
        " accepted, as a node and against B; pearl accepts what draft does and verifies fewer nodes."
        " “root_draw, top token” puts the drafter's likeliest first token in the place of the drawn one. At"
        " temperature 0 root_draw accepts what root does: the draw is no draw.",
        "keeping the drafter's top first token instead of drawing is below pearl in every run.",
        [table, nodes],
        ["accepted"],
    )


def _ratio(numbers: dict[str, Any]) -> Section:
    pairs = {
        "root/draft": "root over draft",
        "root_draw/draft": "root_draw over draft and pearl",
        "top_first/pearl": "root_draw, top token, over pearl",
        "oracle/draft": "oracle over draft",
    }
    rows = [[str(b), *(over(numbers["ratio"][pair][b - 1]) for pair in pairs)] for b in SHOWN]
    return Section(
        "What the root row is worth",
        "Expected accepted tokens of one rule over another's with the same B. pearl accepts what draft does."
        " The oracle is the best tree that is chosen before any draw; root_draw may exceed it, because it draws first.",
        "root over draft +8.6…23.4 % at B = 8 and +2.9…7.9 % at B = 59; root_draw over pearl up to +14.2 % and +7.0 %.",
        [Table(["B", *pairs.values()], rows)],
        ["ratio"],
    )


def _matching(numbers: dict[str, Any]) -> Section:
    rows = [
        [str(b), *(_count(each[key], most) for key, most in (("draft_for_root", LONG), ("root_for_draft", BUDGETS)))]
        for b, each in ((b, numbers["matching"][str(b)]) for b in REPORTED)
    ]
    return Section(
        "Nodes that the root row saves",
        "The smallest node budget with which draft accepts as much as root does with B, and the other way round.",
        "draft needs 11…22 nodes for root's 8; root needs 4…7 for draft's 8.",
        [Table(["B", "draft, to match root at B", "root, to match draft at B"], rows)],
    )


def _equal_nodes(numbers: dict[str, Any]) -> Section:
    rows = [
        [
            str(b),
            each["pearl_nodes"].text(".2f"),
            each["root_draw_nodes"].text(".2f"),
            over(each["equal_cap"]),
            over(each["equal_nodes"]),
            over(each["emitted_equal_cap"]),
            over(each["emitted_equal_nodes"]),
        ]
        for b, each in ((b, numbers["equal_nodes"][str(b)]) for b in REPORTED)
    ]
    return Section(
        "root_draw against pearl",
        "Both draw the first token. root_draw selects below it with all of B, pearl keeps what draft had selected; at"
        " equal mean tree size root_draw gets only as many nodes as pearl has on average (its curve interpolated). A"
        " round emits one token more than it accepts.",
        "same cap up to +14.2 % / +7.0 % (B = 8 / 59), equal mean tree size up to +4.8 % / +2.4 %.",
        [
            Table(
                [
                    "B",
                    "pearl's nodes",
                    "root_draw's nodes",
                    "accepted, equal cap",
                    "accepted, equal mean nodes",
                    "emitted, equal cap",
                    "emitted, equal mean nodes",
                ],
                rows,
            )
        ],
    )


def _truncation(numbers: dict[str, Any]) -> Section:
    tables = [
        Table(
            [f"B = {b}, pool cut to", "draft", "root", "root over draft"],
            [
                [cut, each["draft"].text(), each["root"].text(), over(each["root/draft"])]
                for cut, each in numbers["truncation"][str(b)].items()
            ],
        )
        for b in REPORTED
    ]
    return Section(
        "How large the pool must be",
        "Expected accepted tokens when the pool keeps only its best nodes by draft score: root can only promote what is"
        " there.",
        tables=tables,
    )


def _gain_row(name: str, subset: dict[str, Any]) -> list[str]:
    return [
        name,
        share(subset["share"]),
        *(over(subset[str(b)][f"{rule}/draft"]) for b in REPORTED for rule in ("root", "root_draw")),
    ]


_GAIN_HEADER = ["share of rounds", *(f"{rule}, B = {b}" for b in REPORTED for rule in ("root", "root_draw"))]


def _gains(numbers: dict[str, Any]) -> Section:
    agreement, entropy = numbers["first_token"], numbers["entropy"]
    rows = [
        _gain_row(f"{place}. ({each['entropy']:.2f} nats)", each) for place, each in enumerate(entropy["quintiles"], 1)
    ]
    times = Table(
        ["gain, upper two fifths over lower two", *(f"B = {b}" for b in REPORTED)],
        [
            [rule, *(entropy["upper_to_lower"][str(b)][rule].text(".1f") for b in REPORTED)]
            for rule in ("root", "root_draw")
        ],
    )
    return Section(
        "Where the gain comes from",
        "Expected accepted tokens over draft's, in the rounds in which drafter and target have the same likeliest first"
        " token and in the others, and in fifths of the rounds by the entropy of the target's root row (lowest first).",
        "gains in the upper two fifths are 1.6…12.8 times those in the lower two.",
        [
            Table(
                ["top first token", *_GAIN_HEADER], [_gain_row(name, agreement[name]) for name in ("agree", "differ")]
            ),
            Table(["fifth by entropy (mean)", *_GAIN_HEADER], rows),
            times,
        ],
        ["gains"],
        ["“-” where draft's gain or a fifth's rounds do not exist."],
    )


def _coverage(numbers: dict[str, Any]) -> Section:
    names = {
        "tree": "the tree alone",
        "candidates": "the 59 best pool nodes",
        "frontier": "the tree and its whole frontier",
        "pool": "the whole pool",
    }
    tables = []
    for b in REPORTED:
        rows = [
            [
                names.get(name, name.replace("best ", "the tree and its best ") + " frontier nodes" * ("best" in name)),
                each["scored"].text(".1f"),
                share(each["coverage"]),
            ]
            for name, each in telling_sets(numbers, b).items()
        ]
        tables.append(Table([f"scored, tree of B = {b}", "scored prefixes", "coverage"], rows))
    for b in REPORTED:
        rows = [
            [rule, share(each["coverage"]), each["accepted"].text()]
            for rule, each in numbers["coverage"][str(b)]["stopping"].items()
        ]
        tables.append(Table([f"stopping rule, B = {b}", "coverage", "expected accepted"], rows))
    return Section(
        "Coverage of the next root row",
        "The probability that the exit prefix (accepted path and continuation) was scored, so that the next root row"
        " is there already. Exhaustive verification of draft's tree leaves it, so the tree alone covers nothing;"
        " nodes of the frontier (outside the tree, parent inside) do. A whole pool covers what the whole frontier"
        " does, at more rows. Stopping rules score the tree alone and buy coverage with accepted tokens.",
        "rows of the candidate set 12…17 %, the complete frontier (380…418 candidates) 28…35 %.",
        tables,
        ["coverage"],
    )


def _variation(numbers: dict[str, Any]) -> Section:
    names = {"address": "whole context (address)", "token": "last token only"}
    rows = [
        [names[match], str(each["rounds"]), share(each["exists"]), each["mean"].text(".4f")]
        for match, each in numbers["variation"].items()
    ]
    return Section(
        "What a row at another address is worth",
        "Total variation distance (0 = equal, 1 = disjoint) from the next root row to a row that was scored before:"
        " at the same address, and at the first address that only ends in the same token.",
        "below 0.01 at matched addresses, 0.38…0.79 where only the last token matches.",
        [Table(["match", "rounds", "exists in", "mean total variation"], rows)],
        ["variation"],
    )


def _recovered(numbers: dict[str, Any]) -> Section:
    rows = [
        [
            f"B = {b}",
            *(share(numbers["recovered"][str(b)][name]) for name in ("root", "rows_to_1", "rows_to_2")),
        ]
        for b in REPORTED
    ]
    return Section(
        "How far the root row goes towards the oracle",
        "The oracle knows all rows. A tree is chosen with the target's probability on the edges below the root (root"
        " row), also below depth 1, and also below depth 2, and the drafter's on all others; the numbers are the"
        " shares of the oracle's advantage over draft that it recovers: (own - draft) / (oracle - draft).",
        None,
        [Table(["", "root row alone", "rows through depth 1", "rows through depth 2"], rows)],
    )


def _absent(numbers: dict[str, Any]) -> Section:
    return Section(
        "Drawn tokens that the pool lacks",
        "The probability that a token drawn from the root row is not in the pool's first level; then root_draw and"
        " pearl have no tree.",
        "1.2…8.4 % of rounds (B = 59).",
        notes=[f"{share(numbers['absent'], 2)} of the rounds."],
    )


def _tasks(numbers: dict[str, Any]) -> Section:
    rows = [
        [name, str(each["prompts"]), str(each["rounds"]), *_gain_row(name, each)[2:]]
        for name, each in numbers["tasks"].items()
    ]
    return Section(
        "By task",
        "Expected accepted tokens over draft's, for the prompts of each task.",
        None,
        [Table(["task", "prompts", "rounds", *_GAIN_HEADER[1:]], rows)],
        ["tasks"],
    )


def _reranker(numbers: dict[str, Any]) -> Section:
    reranker = numbers["reranker"]
    title = "A learned reranker"
    text = (
        "A small network estimates the target's probability of each edge from the drafter's log q, the parent's path"
        " score and the depth, and, “with rows”, from the last verification's rows: the one whose last token matches"
        " and the one at the exit. Direct substitution puts the matching row's probability (at least 1e-6) in the"
        " place of q. Trained on one half of the prompts, compared on the other."
    )
    if not reranker["prompts"]:
        return Section(title, text, notes=["One prompt cannot be split into training and test: not trained."])
    rows = []
    for method in METHODS:
        name = "direct substitution" if method == "substitution" else f"reranker {method}"
        cells = [(reranker[str(b)][method].text(), over(reranker[str(b)][f"{method}/draft"])) for b in REPORTED]
        rows.append([name, *(cell for pair in cells for cell in pair)])
    drafts = [cell for b in REPORTED for cell in (reranker[str(b)]["draft"].text(), "")]
    header = ["", *(cell for b in REPORTED for cell in (f"accepted, B = {b}", "over draft"))]
    rows_worth = ", ".join(f"{over(reranker[str(b)]['with rows/without rows'])} at B = {b}" for b in REPORTED)
    notes = [
        f"Trained on {reranker['edges']} edges of {reranker['training_prompts']} prompts, tested on"
        f" {reranker['prompts']} others. The rows' own share, with rows over without: {rows_worth}."
    ]
    if "file" in reranker:
        notes.append(f"Written to {reranker['file']}.")
    return Section(title, text, None, [Table(header, [["draft", *drafts], *rows])], ["reranker"], notes)


_SECTIONS: tuple[Callable[[dict[str, Any]], Section], ...] = (
    _engine,
    _accepted,
    _ratio,
    _matching,
    _equal_nodes,
    _truncation,
    _gains,
    _coverage,
    _variation,
    _recovered,
    _absent,
    _tasks,
    _reranker,
)


def _some(numbers: dict[str, Any], what: str) -> str:
    count = numbers[f"{what}s"]
    return f"{count} {what}{'s' * (count != 1)}"


def _heading(numbers: dict[str, Any]) -> str:
    return f"{numbers['name'][0].upper()}{numbers['name'][1:]}: {_some(numbers, 'prompt')}, {_some(numbers, 'round')}"


def _sources(numbers: dict[str, Any]) -> list[str]:
    lines = []
    for each in numbers["recordings"]:
        settings = ", ".join(f"{key} = {value}" for key, value in each["settings"].items())
        lines.append(f"{each['path']}: {settings}" if settings else each["path"])
    if numbers["prompts"] < 10:
        lines.append(f"Only {_some(numbers, 'prompt')}: the intervals are too narrow to be relied on.")
    return lines


def text(chapters: Sequence[Chapter], about: dict[str, Any]) -> str:
    """For the console: tables in columns."""
    parts = [METHOD.format(**about)]
    for numbers, own, _ in chapters:
        heading = _heading(numbers)
        parts += [f"{heading}\n{'=' * len(heading)}", *_sources(numbers)]
        for section in own:
            parts += [f"## {section.title}", section.text]
            parts += [f"The paper: {section.paper}"] if section.paper else []
            parts += [align(table.header, table.lines) for table in section.tables]
            parts += [note.replace("**", "") for note in section.notes]
    return "\n\n".join(parts)


def markdown(chapters: Sequence[Chapter], about: dict[str, Any]) -> str:
    """The report in Markdown, with its charts beside it."""
    parts = ["# Study of recorded rounds", METHOD.format(**about)]
    for numbers, own, files in chapters:
        parts += [f"## {_heading(numbers)}", "\n".join(f"- {line}" for line in _sources(numbers))]
        for section in own:
            parts += [f"### {section.title}", section.text]
            parts += [f"*The paper: {section.paper}*"] if section.paper else []
            for table in section.tables:
                lines = [table.header, ["---"] * len(table.header), *table.lines]
                parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
            parts += section.notes
            parts += [f"![{section.title}]({files[name].name})" for name in section.charts if name in files]
    return "\n\n".join(parts) + "\n"


_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1020px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.3em; margin-top: 2.4em; border-bottom: 1px solid #ccc; }
h3 { font-size: 1.1em; margin: 2em 0 .3em; }
p { margin: .4em 0; max-width: 52em; } .about, .source { color: #666; font-size: .9em; }
.paper { border-left: 3px solid #e69f00; padding-left: .7em; color: #555; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85em; margin: .8em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2em .8em .2em 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #eee; }
th { border-bottom: 1px solid #999; font-weight: 600; } th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; margin: .4em 0; }
nav a { margin-right: 1em; }
"""


def html(chapters: Sequence[Chapter], about: dict[str, Any]) -> str:
    """The report as one file: charts are embedded, nothing is loaded from elsewhere."""
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Study of recorded rounds</title><style>{_CSS}</style></head><body>",
        f'<h1>Study of recorded rounds</h1><p class="about">{escape(METHOD.format(**about))}</p>',
    ]
    if len(chapters) > 1:
        links = (f'<a href="#c{i}">{escape(_heading(numbers))}</a>' for i, (numbers, _, _) in enumerate(chapters))
        parts.append(f"<nav>{''.join(links)}</nav>")
    for place, (numbers, own, files) in enumerate(chapters):
        parts.append(f'<h2 id="c{place}">{escape(_heading(numbers))}</h2>')
        parts += [f'<p class="source">{escape(line)}</p>' for line in _sources(numbers)]
        for section in own:
            parts += [f"<h3>{escape(section.title)}</h3><p>{escape(section.text)}</p>"]
            parts += [f'<p class="paper">The paper: {escape(section.paper)}</p>'] if section.paper else []
            parts += [_image(files[name], section.title) for name in section.charts if name in files]
            parts += [_html_table(table) for table in section.tables]
            for note in section.notes:
                loud = note.count("**") == 2
                before, strong, after = escape(note).split("**") if loud else (escape(note), "", "")
                parts.append(f"<p>{before}<strong>{strong}</strong>{after}</p>" if loud else f"<p>{before}</p>")
    return "\n".join([*parts, "</body></html>\n"])


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in table.lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _image(path: Path, title: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">'
