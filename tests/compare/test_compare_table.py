"""The comparison in a terminal."""

import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from planner_ext.cli.compare import print_comparison
from planner_ext.compare import Comparison


def printed(comparison: Comparison, width: int, *, colour: bool = False) -> str:
    """What a terminal of this width shows."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        _environ={},
    )
    print_comparison(console, comparison)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_nothing_is_cut(comparison: Comparison, width: int) -> None:
    """Every line fits, nothing is shortened, and no option's name is broken."""
    text = printed(comparison, width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    for option in comparison.options:
        name = option.short if width < 88 else option.name
        ran = sum(run.offered for run in comparison.of_option(option.key))
        assert len(re.findall(rf"^{re.escape(name)} +[0-9]", text, re.M)) == ran


def test_every_figure_is_in_the_table(comparison: Comparison) -> None:
    """The row of a run has round trips, excess, charge, functions, tokens, end, answer, history and time."""
    row = next(
        line
        for line in printed(comparison, 100).splitlines()
        if line.startswith("option 3, as written")
    )
    run = comparison.of_option("option-3")[0]
    figures = row.removeprefix("option 3, as written").split()
    assert figures[:5] == ["15", "+10", "5", "10", "+6"]
    assert figures[5:7] == [f"{run.tokens_summed:,}", f"{run.tokens_told:,}"]
    assert figures[7:10] == ["limit", "no", "BROKEN"]
    assert re.fullmatch(r"\d+\.\d\d", figures[10])


def test_the_first_violation_stands_below_the_table(comparison: Comparison) -> None:
    """With what OpenAI would have refused."""
    text = " ".join(printed(comparison, 100).split())
    assert (
        "option 3, as written: messages[10]: an assistant message with 'tool_calls' must be followed by"
        in text
    )
    assert "OpenAI would refuse 10 of the 15 requests" in text


def test_the_verdict_comes_last(comparison: Comparison, spoilt: Comparison) -> None:
    """A reader who sees the last lines alone knows how it came out."""
    assert "no budget exceeded, no history and no limit broken, in 82 runs" in " ".join(
        printed(comparison, 100).splitlines()[-3:-1]
    )
    assert (
        printed(spoilt, 100)
        .splitlines()[-2]
        .startswith("option 3, corrected, chain: the history is broken")
    )


def test_a_model_cannot_steer_the_terminal(spoilt: Comparison) -> None:
    """Control characters in ids, names and errors are shown, and not obeyed."""
    assert "\x1b" not in printed(spoilt, 100)


def test_what_goes_wrong_is_red(comparison: Comparison) -> None:
    """Overshoot and broken histories are coloured; a corrected option's row is not."""
    lines = printed(comparison, 100, colour=True).splitlines()
    written, corrected = (
        next(
            line
            for line in lines
            if line.lstrip("\x1b[01m").startswith(f"option {which}")
        )
        for which in ("3, as", "3, corr")
    )
    assert "\x1b[1;31m" in written
    assert "\x1b[1;31m" not in corrected


def test_a_terminal_without_the_signs_gets_letters(comparison: Comparison) -> None:
    """An ASCII terminal sees X, 0 and . for the signs."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    first = comparison.scripts[:2]
    runs = tuple(
        run for run in comparison.runs if run.script in {script.key for script in first}
    )
    narrowed = replace(comparison, scripts=first, runs=runs)
    console = Console(file=out, width=100, _environ={})
    print_comparison(console, narrowed)
    out.flush()
    assert b"+10X0" in out.buffer.getvalue()
