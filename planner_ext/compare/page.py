"""A comparison as one self-contained page: nothing to fetch, no script; light and dark, wide and narrow.

Everything that a model or a function said is escaped.
"""

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files

from planner_ext.compare.charts import HATCHING, Bar, bar_chart
from planner_ext.compare.comparison import Comparison, Run, ScriptInfo
from planner_ext.compare.page_timeline import timeline
from planner_ext.compare.words import counted, ending, seconds

__all__ = ["page_of"]


def page_of(comparison: Comparison) -> str:
    """Write the page."""
    style = files("planner_ext.compare").joinpath("page.css").read_text("utf-8")
    allowed = counted(comparison.max_iterations, "round trip")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Who keeps a budget of {allowed}?</title><style>{style}</style></head><body>{HATCHING}"
        f"{_header(comparison, allowed)}<main>{_overview(comparison)}{_matrix(comparison)}{_glossary()}"
        f"{''.join(_script(comparison, script) for script in comparison.scripts)}</main>{_footer(comparison)}"
        "</body></html>\n"
    )


def _header(comparison: Comparison, allowed: str) -> str:
    corrected = [option for option in comparison.options if option.corrected]
    runs = sum(len(comparison.of_option(option.key)) for option in corrected)
    if not corrected:
        verdict = '<p class="verdict">No corrected option was compared.</p>'
    elif comparison.holds:
        verdict = f'<p class="verdict good">✓ The corrected options kept it in all of their {runs} runs.</p>'
    else:
        failures = "".join(f"<li>{escape(text)}</li>" for text in comparison.failures)
        verdict = f'<div class="verdict bad"><p>✗ A corrected option did not keep it:</p><ul>{failures}</ul></div>'
    return (
        f"<header><h1>Who keeps a budget of {allowed}?</h1>"
        '<p class="lede">A model that may call functions is asked, has one run, and is asked again: each request and '
        f"its reply is a round trip. Here {_number(len(comparison.options), 'way')} to limit them are put in "
        f"{_number(len(comparison.scripts), 'situation')}, with {allowed} allowed in each. What they really made was "
        f"counted where the requests arrive.</p>{verdict}</header>"
    )


def _number(number: int, noun: str) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return f"{words[number] if number < len(words) else number} {noun}{'' if number == 1 else 's'}"


def _overview(comparison: Comparison) -> str:
    """Draw the script that shows most: the one with the greatest excess."""
    worst = max(comparison.scripts, key=lambda script: max(run.over_budget for run in comparison.of_script(script.key)))
    options = "".join(
        f"<dt{_ours(option.corrected)}>{escape(option.name)}</dt><dd>{escape(option.about)}</dd>"
        for option in comparison.options
    )
    return (
        f'<section class="overview"><div><h2>{escape(worst.about)}</h2>'
        f"{_chart(comparison, worst, 'overview', 'Round trips', lambda run: (run.trips, run.over_budget), budget=True)}"
        '<p class="key"><span class="swatch theirs"></span>within the budget '
        '<span class="swatch ours"></span>within, corrected option '
        '<span class="swatch excess"></span>over the budget</p></div>'
        "<div><h2>The options</h2><p>Three are from Semantic Kernel's decision record “Automatic Tool Calling "
        "Controls” (2024), as it writes them; two were there without it; three are its options as this package "
        "corrects them.</p>"
        f"<dl>{options}</dl></div></section>"
    )


def _matrix(comparison: Comparison) -> str:
    heads = "".join(
        f'<th scope="col"><a href="#{escape(script.key)}">{escape(script.name)}</a></th>'
        for script in comparison.scripts
    )
    rows = "".join(
        f'<tr{_ours(option.corrected)}><th scope="row">{escape(option.name)}</th>'
        f"{''.join(_verdict(comparison, run) for run in comparison.of_option(option.key))}</tr>"
        for option in comparison.options
    )
    return (
        '<section><h2>What goes wrong, and where</h2><div class="scroll" tabindex="0" role="region" '
        'aria-label="What goes wrong, for each option and situation"><table class="matrix">'
        f'<thead><tr><th scope="col">option</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _verdict(comparison: Comparison, run: Run) -> str:
    bad = [f"+{run.over_budget} over"] if run.over_budget else []
    bad += ["broken history"] if run.broken else []
    bad += ["failed"] if run.status == "failed" else []
    poor = ["no answer"] if not run.answer else ["unfinished"] if comparison.unfinished(run) else []
    lines = [f"<strong>{text}</strong>" for text in bad] + poor
    return f'<td class="{"bad" if bad else "poor" if poor else "fine"}">{"<br>".join(lines) or "✓"}</td>'


def _script(comparison: Comparison, script: ScriptInfo) -> str:
    charts = (
        _chart(comparison, script, "trips", "Round trips", lambda run: (run.trips, run.over_budget), budget=True),
        _chart(
            comparison,
            script,
            "tools",
            "Functions run",
            lambda run: (run.tools_run, run.tools_past_budget),
            note="striped: no trip left to read the result",
        ),
        _chart(
            comparison,
            script,
            "tokens",
            "Tokens",
            lambda run: (run.tokens_summed, run.tokens_past_budget),
            note="striped: in trips over the budget",
        ),
    )
    runs = comparison.of_script(script.key)
    return (
        f'<section class="script" id="{escape(script.key)}"><h2>{escape(script.name)}</h2>'
        f'<p class="about">{escape(script.about)} <span class="goal">Asked: “{escape(script.goal)}”</span></p>'
        f'<div class="charts">{"".join(charts)}</div>{_table(comparison, script, runs)}'
        f"<h3>What was said, message by message</h3>{''.join(timeline(comparison, run) for run in runs)}</section>"
    )


def _chart(
    comparison: Comparison,
    script: ScriptInfo,
    key: str,
    title: str,
    amounts: Callable[[Run], tuple[int, int]],
    *,
    note: str = "",
    budget: bool = False,
) -> str:
    bars: list[Bar] = []
    for run in comparison.of_script(script.key):
        option = comparison.option(run.option)
        total, over = amounts(run)
        bars.append(Bar(label=option.name, within=total - over, over=over, ours=option.corrected))
    line = comparison.max_iterations if budget else None
    return bar_chart(title, bars, key=f"{script.key}-{key}", note=note, budget=line)


_COLUMNS = (
    "option",
    "round trips",
    "over budget",
    "charged",
    "functions run",
    "past budget",
    "tokens summed",
    "tokens told",
    "status",
    "answer",
    "history",
    "seconds",
)
_IN_WORDS: dict[str, str] = dict.fromkeys(("status", "answer", "history"), ' class="words"')


def _table(comparison: Comparison, script: ScriptInfo, runs: Sequence[Run]) -> str:
    heads = "".join(f'<th scope="col"{_IN_WORDS.get(name, "")}>{name}</th>' for name in _COLUMNS)
    rows = "".join(_row(comparison, run) for run in runs)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Numbers: {escape(script.name)}"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(comparison: Comparison, run: Run) -> str:
    option = comparison.option(run.option)
    told = "nothing" if run.tokens_told is None else f"{run.tokens_told:,}"
    cells = (
        _cell(f"{run.trips}"),
        _cell(f"+{run.over_budget}" if run.over_budget else "0", bad=bool(run.over_budget)),
        _cell(f"{run.charged}", poor=run.charged != run.trips),
        _cell(f"{run.tools_run}"),
        _cell(f"+{run.tools_past_budget}" if run.tools_past_budget else "0", bad=bool(run.tools_past_budget)),
        _cell(f"{run.tokens_summed:,}"),
        _cell(told, poor=run.tokens_told != run.tokens_summed),
        _cell(ending(run.status), bad=run.status == "failed", words=True),
        _cell("yes" if run.answer else "no", poor=not run.answer, words=True),
        _cell("valid" if run.history_valid else f"broken: {run.first_violation}", bad=run.broken, words=True),
        _cell(seconds(run.wall_seconds)),
    )
    return f'<tr{_ours(option.corrected)}><th scope="row">{escape(option.name)}</th>{"".join(cells)}</tr>'


def _cell(text: str, *, bad: bool = False, poor: bool = False, words: bool = False) -> str:
    classes = [name for name, is_so in (("bad", bad), ("poor", poor), ("words", words)) if is_so]
    return f'<td class="{" ".join(classes)}">{escape(text)}</td>' if classes else f"<td>{escape(text)}</td>"


def _ours(corrected: bool) -> str:
    return ' class="ours"' if corrected else ""


def _glossary() -> str:
    words = "".join(f"<dt>{word}</dt><dd>{meaning}</dd>" for word, meaning in _WORDS)
    return (
        f'<section class="glossary"><details><summary>What the words mean</summary><dl>{words}</dl></details></section>'
    )


_WORDS = (
    ("round trip", "One request to the model and its reply. This is what the budget limits."),
    ("charged", "The round trips that an option believes it made; its limit is only as good as this number."),
    ("functions run", "Functions that were really started because the model called them."),
    ("past budget", "Functions started when no round trip was left in which the model could read the result."),
    (
        "tokens summed",
        "Tokens of all round trips: what is paid for. A scripted model's are estimated from the characters.",
    ),
    (
        "tokens told",
        "What an option tells its caller: the usage of its result or, where that has none, of the last message.",
    ),
    ("status", "answered: the model was done. limit: the budget, or what was charged of it, ran out."),
    (
        "answer",
        "Whether the caller gets a text. Where the budget ran out, it is the one that the model then had to give.",
    ),
    (
        "history",
        "The messages that are left. In a valid one every function call has exactly one result right after it; OpenAI "
        "refuses any other. The scripted endpoint of this comparison answers it all the same, as some endpoints do, so "
        "that each option shows all that it would do.",
    ),
    ("unfinished", "The budget ran out where another option finished the same work within it."),
)


def _footer(comparison: Comparison) -> str:
    versions = ", ".join(f"{escape(name)} {escape(version)}" for name, version in comparison.versions)
    return (
        f"<footer><p>Answered by {escape(comparison.endpoint)}. {len(comparison.runs)} runs in "
        f"{seconds(comparison.wall_seconds)} seconds, with {versions}. "
        "Made by <code>planner-ext compare</code>.</p></footer>"
    )
