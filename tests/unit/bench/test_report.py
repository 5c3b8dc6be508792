"""The page as it is written."""

from tests.bench.report import (
    LIMITS,
    Ratio,
    Section,
    Table,
    chapter,
    joined,
    milliseconds,
    percentiles,
    render,
)
from tests.bench.stats import Series, Spread


def page() -> str:
    ratio = Ratio("a reset", "a start", Spread(0.0631, 0.05, 1.234, 5))
    table = Table("Resets", "Milliseconds.", ["", "p50 ms"], [["reset", "2.14"]])
    return render([Section("Sandboxes", "One at a time.", [ratio], [table])], [("kernel", "Linux 6")])


def test_a_ratio_names_both_sides_and_shows_its_range() -> None:
    assert "| a reset | a start | **0.063** | 0.050 - 1.23 | 5 |" in page()


def test_ratios_come_before_absolute_figures_and_limits_last() -> None:
    text = page()
    order = [text.index(mark) for mark in ("- kernel: Linux 6", "## Ratios", "One at a time.", "a reset")]
    order += [text.index(mark) for mark in ("## Absolute figures", "| reset | 2.14 |", "## Limits", LIMITS)]
    assert order == sorted(order)


def test_a_table_has_a_line_below_its_head() -> None:
    assert "|  | p50 ms |\n| --- | --- |\n| reset | 2.14 |" in page()


def test_figures_have_three_digits() -> None:
    seconds = (0.0000123, 0.00123, 0.0123, 0.1234)
    assert [milliseconds(each) for each in seconds] == ["0.012", "1.23", "12.3", "123"]


def test_a_row_of_percentiles_says_how_many_samples_it_stands_on() -> None:
    series = Series()
    series.add([0.001, 0.002, 0.003])
    assert percentiles(series) == ["2.00", "2.98", "3"]


def part(value: str) -> str:
    ratio = Ratio("a reset", "a start", Spread(0.0631, 0.05, 1.234, 5))
    table = Table("Resets", "Milliseconds.", ["", "p50 ms"], [["reset", value]])
    return chapter(
        "Elsewhere", [Section("Pods", "Real ones.", [ratio], [table])], [("date", "today")], "Few."
    )


def test_a_chapter_has_facts_ratios_tables_and_limits_of_its_own() -> None:
    text = part("2.14")
    order = [
        "## Elsewhere",
        "- date: today",
        "### Pods",
        "| a reset |",
        "**Resets.** Milliseconds.",
        "| 2.14 |",
    ]
    places = [text.index(mark) for mark in [*order, "Few."]]
    assert places == sorted(places)


def test_page_and_chapter_are_replaced_alone() -> None:
    whole = joined("", {"Elsewhere": part("2.14")}, page=page())
    assert whole == page() + "\n" + part("2.14")
    assert joined(whole, {"Elsewhere": part("3.33")}) == page() + "\n" + part("3.33")
    assert joined(whole, {"Elsewhere": None}, page="# New\n") == "# New\n\n" + part("2.14")
    assert joined(page(), {"Elsewhere": None}) == page()


def test_chapters_keep_their_order_and_are_replaced_alone() -> None:
    first = part("1.11").replace("## Elsewhere", "## Before")
    whole = joined(page() + "\n" + part("2.14"), {"Before": first, "Elsewhere": None})
    assert whole == page() + "\n" + first + "\n" + part("2.14")
    assert joined(whole, {"Before": None, "Elsewhere": None}) == whole
    assert joined(whole, {"Before": None, "Elsewhere": part("3.33")}) == (
        page() + "\n" + first + "\n" + part("3.33")
    )
