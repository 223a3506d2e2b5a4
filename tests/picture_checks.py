"""Whether a page, as a browser shows it, says what `inspect --json` says.

Each check yields what differs; what it wants is worked out from the JSON and the texts alone.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.browser import Browser

WINDOWS = ((360, 740), (820, 1100), (1400, 900), (2200, 1200))
NEAR = 0.011  # of a side: a rectangle is drawn in whole pixels here and there

# --- What the page is asked for

# Each tile with the rectangles in it.
TILES = """[...document.querySelectorAll('.tile')].map(tile => ({
    key: tile.dataset.key, caption: tile.querySelector('small').textContent,
    rects: [...tile.querySelectorAll('rect')].map(r => ({
        look: r.classList[0], chip: r.dataset.chip === undefined ? null : Number(r.dataset.chip),
        x: r.x.baseVal.value, y: r.y.baseVal.value,
        width: r.width.baseVal.value, height: r.height.baseVal.value}))}))"""

# What the tip says over every element that a selector finds, as lists of label and text.
TIPS = """[...document.querySelectorAll(SELECTOR)].map(element => {
    element.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));
    const tip = document.getElementById('tip');
    return {key: element.closest('[data-key]')?.dataset.key,
        chip: Number(element.closest('[data-chip]')?.dataset.chip ?? -1),
        place: element.closest('[data-segment]')?.dataset.segment ?? element.dataset.chart,
        title: tip.querySelector('b').textContent,
        said: Object.fromEntries([...tip.querySelectorAll('dt')].map(
            dt => [dt.textContent, dt.nextElementSibling.textContent]))}})"""

# Each bar of a chart or of the timeline: how much of it is a chip's own.
BARS = """[...document.querySelectorAll('.bar, .track')].map(bar => {
    const side = bar.matches('.bar') ? 'height' : 'width';
    const size = part => part.getBoundingClientRect()[side];
    const parts = [...bar.children].map(part => [part.className, size(part)]);
    const all = parts.reduce((sum, [, n]) => sum + n, 0);
    return {chip: Number(bar.dataset.chip),
        place: bar.dataset.chart ?? bar.closest('[data-segment]').dataset.segment,
        own: parts.filter(([look]) => look !== 'pad').reduce((sum, [, n]) => sum + n, 0) / all}})"""

TABLE = """[...document.querySelectorAll(SELECTOR)].map(
    row => [...row.children].map(cell => cell.textContent))"""
LINES = "[...document.querySelectorAll('.line')].map(line => line.innerText)"
POINTED = """(() => {
    const found = document.querySelector(SELECTOR);
    found.scrollIntoView({block: 'center'});
    const box = found.getBoundingClientRect();
    return [box.x + Math.min(box.width / 2, 30), box.y + box.height / 2]})()"""


def with_selector(question: str, selector: str) -> str:
    """A question about what a selector finds."""
    return question.replace("SELECTOR", repr(selector))


def place(browser: Browser, selector: str) -> list[float]:
    """Where an element is, scrolled into the window."""
    return browser.ask(with_selector(POINTED, selector))


# --- Names


def key_of(matrix: dict[str, Any], layer: int | None) -> str:
    """The name of a matrix in a layer, without a chip."""
    return matrix["name"] if layer is None else f"{matrix['name']}{layer}"


def keys(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every matrix by name, layers written out."""
    return {
        key_of(matrix, layer): matrix
        for matrix in facts["matrices"]
        for layer in (
            [None] if matrix["kind"] is None else facts["kinds"][matrix["kind"]]["layers"]
        )
    }


def named(text: str) -> set[str]:
    """The words of a statement, without their chips."""
    return {re.sub(r"_c\d+$", "", word) for word in re.findall(r"[A-Za-z]\w*", text)}


def numbers(text: str | None) -> list[int]:
    """The whole numbers in a text."""
    return [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", text or "")]


# --- Checks of one page


def drawings(browser: Browser, facts: dict[str, Any]) -> Iterator[str]:
    """Rectangles against ranges, and the strips beside them against what is held and given."""
    matrices = keys(facts)
    shown = browser.ask(TILES)
    wanted = {m["name"] if m["kind"] is None else (m["name"], m["kind"]) for m in facts["matrices"]}
    if len(shown) != len(wanted):
        yield f"{len(shown)} matrices are shown, wanted {len(wanted)}"
    for tile in shown:
        matrix = matrices[tile["key"]]
        if numbers(tile["caption"])[:2] != matrix["whole"]:
            yield f"{tile['key']} is said to be {tile['caption']}, wanted {matrix['whole']}"
        for problem in _drawing(tile["rects"], matrix):
            yield f"{tile['key']}: {problem}"


def _drawing(rects: list[dict[str, Any]], matrix: dict[str, Any]) -> Iterator[str]:
    if matrix["axis"] is None:
        if [r["look"] for r in rects] != ["everywhere", "frame"]:
            yield "it is on every chip, and not drawn as that"
        return
    at = ("rows", "cols").index(matrix["axis"])
    start, length, across = (("y", "height", "x"), ("x", "width", "y"))[at]
    (frame,) = (r for r in rects if r["look"] == "frame")
    extent = matrix["whole"][at] / matrix["blocks"]
    beside = frame["width" if across == "x" else "height"]
    for chip, ranges in enumerate(matrix["ranges"]):
        own = [r for r in rects if r["look"] == "slice" and r["chip"] == chip]
        inside = [(r[start], r[start] + r[length]) for r in own if r[across] < beside]
        drawn = [[n / frame[length] for n in run] for run in joined(inside)]
        wanted = joined([(s / extent, (s + n) / extent) for s, n in ranges])
        if not close(drawn, wanted):
            yield f"chip {chip} is drawn at {drawn}, wanted {wanted}"
        cell = sum(r[length] for r in own if r[across] > beside) / frame[length]
        share = matrix["held"][chip][at] / max(matrix["given"][at], 1) / len(matrix["ranges"])
        if abs(cell - share) > NEAR:
            yield f"chip {chip} has {cell:.3f} of the strip, wanted {share:.3f}"


def joined(runs: Sequence[Sequence[float]]) -> list[list[float]]:
    """Runs that touch, as one."""
    found: list[list[float]] = []
    for first, end in sorted(runs):
        if found and first - found[-1][1] < 1e-6:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([first, end])
    return found


def close(some: list[list[float]], others: list[list[float]]) -> bool:
    """Whether runs are the same but for rounding."""
    flat, other = ([n for run in runs for n in run] for runs in (some, others))
    return len(flat) == len(other) and all(
        abs(a - b) < NEAR for a, b in zip(flat, other, strict=True)
    )


def tips(browser: Browser, facts: dict[str, Any]) -> Iterator[str]:
    """What is said over each slice and each matrix, against the JSON's numbers."""
    matrices = keys(facts)
    selector = ".tile, .tile rect[data-chip]"
    for tip in browser.ask(with_selector(TIPS, selector)):
        matrix, chip = matrices[tip["key"]], tip["chip"]
        wanted = _said(matrix, None if chip < 0 or matrix["axis"] is None else chip)
        for label, want in wanted.items():
            found = numbers(tip["said"].get(label))
            if found != want:
                yield f"{tip['title']}: {label} is {tip['said'].get(label)!r}, wanted {want}"


def _said(matrix: dict[str, Any], chip: int | None) -> dict[str, list[int]]:
    """The numbers that stand after each label."""
    alike = {"alike in": [matrix["count"]]} if matrix["count"] > 1 else {}
    said = {"whole": matrix["whole"], **alike}
    if matrix["axis"] is None:
        return {**said, "bytes": [matrix["given_bytes"]]}
    if chip is None:
        given = [matrix["whole_bytes"], matrix["given_bytes"]]
        return {**said, "given": matrix["given"], "bytes": given}
    at = ("rows", "cols").index(matrix["axis"])
    own, given, ranges = matrix["held"][chip], matrix["given"], matrix["ranges"][chip]
    others = [
        other
        for other, theirs in enumerate(matrix["ranges"])
        if other != chip and ranges and any(s <= ranges[0][0] < s + n for s, n in theirs)
    ]
    spans = [n for start, length in ranges for n in (start, start + length - 1)]
    if len(ranges) > 4:
        spans = [*spans[:6], len(ranges)]
    blocks = [matrix["blocks"]] if matrix["blocks"] > 1 else []
    holds = [*spans, matrix["whole"][at] // matrix["blocks"], *blocks] if own[at] > 0 else []
    return {
        **said,
        "own part": own,
        "given": given,
        "padding": [given[at] - own[at]] if given[at] > own[at] else [],
        "bytes": [matrix["held_bytes"][chip], matrix["given_bytes"]],
        "holds": holds,
        **({"also on": _runs(others)} if len(_runs(others)) <= 4 else {}),
    }


def _runs(chips: list[int]) -> list[int]:
    """The ends of runs of chips, as they are written: `1-3, 5`."""
    runs = joined([(c, c + 1) for c in chips])
    return [int(n) for a, b in runs for n in ([a] if b - a == 1 else [a, b - 1])]


def bars(browser: Browser, facts: dict[str, Any]) -> Iterator[str]:
    """The bars of the balance and of the timeline: their length, and what is said over them."""
    for bar in browser.ask(BARS):
        own, given = _own(facts, bar["place"], bar["chip"], "reads")
        if abs(bar["own"] - own / max(given, 1)) > NEAR and given > 0:
            where = f"bar {bar['place']} of chip {bar['chip']}"
            yield f"{where} is {bar['own']:.3f}, wanted {own}/{given}"
    for tip in browser.ask(with_selector(TIPS, ".bar, .track")):
        place, chip = tip["place"], tip["chip"]
        measures = ("reads", "operations") if place.isdigit() else (place,)
        for label, measure in zip(_labels(place), measures, strict=True):
            want = list(_own(facts, place, chip, measure))
            if numbers(tip["said"].get(label)) != want:
                yield f"{place} of chip {chip}: {label} {tip['said'].get(label)!r}, wanted {want}"


def _labels(place: str) -> tuple[str, ...]:
    if place.isdigit():
        return ("reads", "computes")
    return ({"bytes": "in all", "reads": "read", "operations": "operations"}[place],)


def _own(facts: dict[str, Any], place: str, chip: int, measure: str) -> tuple[int, int]:
    """What a bar stands for, and what it is out of."""
    if place.isdigit():
        segment = facts["segments"][int(place)]
        return segment[measure][chip], segment[f"given_{measure}"]
    return facts["chips"][chip][place], facts["chips"][chip][f"given_{place}"]


# What stands under the headings of the two tables, by the keys of the JSON.
OF_CHIPS = {
    "query heads": "query_heads",
    "kv heads": "kv_heads",
    "value heads": "value_heads",
    "key heads": "key_heads",
    "ffn columns": "ffn_columns",
    "expert columns": "expert_columns",
    "shared columns": "shared_columns",
    "vocabulary": "vocabulary",
    "weights": "weight_bytes",
    "padding": "padding_bytes",
    "caches": "cache_bytes",
    "states": "state_bytes",
    "tables": "table_bytes",
    "read": "reads",
    "operations": "operations",
}
OF_MEETINGS = {
    "times": "count",
    "own reads at most": "reads",
    "reads given": "given_reads",
    "own operations at most": "operations",
    "operations given": "given_operations",
    "brought": "bytes",
    "sent": "sent",
}


def tables(browser: Browser, facts: dict[str, Any]) -> Iterator[str]:
    """The tables under the bars and under the timeline."""
    meetings = [
        {**segment, **collective}
        for segment, collective in zip(facts["segments"], facts["collectives"], strict=True)
    ]
    for selector, keyed, wanted in (
        ("#numbers tr", OF_CHIPS, facts["chips"]),
        ("#meetings tr", OF_MEETINGS, meetings),
    ):
        heading, *rows = browser.ask(with_selector(TABLE, selector))
        if len(rows) != len(wanted):
            yield f"{selector}: {len(rows)} rows, wanted {len(wanted)}"
        for row, want in zip(rows, wanted, strict=False):
            for name, cell in zip(heading, row, strict=True):
                value = want.get(keyed.get(name))
                value = max(value) if isinstance(value, list) else value
                if name in keyed and numbers(cell) != [value]:
                    yield f"{selector} of {row[0]}: {name} is {cell}, wanted {value}"


def texts(browser: Browser, wanted: dict[int, str]) -> Iterator[str]:
    """The page's texts of chips against the authored ones."""
    for chip, text in wanted.items():
        found = browser.ask(f"programOf({chip})")
        if found != text:
            differs = [
                a for a, b in zip(found.split("\n"), text.split("\n"), strict=False) if a != b
            ]
            yield f"the text of chip {chip} differs: {differs[:1] or 'it is shorter or longer'}"
        shown = _shown(browser, chip)
        strange = [line for line in shown if line not in set(text.split("\n"))]
        if strange or not shown:
            yield f"shown as chip {chip}'s: {strange[:1] or 'nothing'}"


def _shown(browser: Browser, chip: int) -> list[str]:
    browser.click(*place(browser, f"#chips [data-chip='{chip}']"))
    return browser.ask(LINES)


def links(browser: Browser) -> Iterator[str]:
    """A matrix lights up its statements, pointed at or clicked; a statement its matrices."""
    lines, shown = browser.ask(LINES), [tile["key"] for tile in browser.ask(TILES)]
    for key in shown:
        wanted = [line for line in lines if key in named(line)]
        at = place(browser, f'.tile[data-key="{key}"] b')
        for look, move in (("hit", browser.point), ("used", browser.click)):
            move(*at)
            found = browser.ask(LINES.replace(".line", f".line.{look}"))
            if found != wanted:
                yield f"{key} has {look} {found}, wanted {wanted}"
    used = "[...document.querySelectorAll('.tile.used')].map(tile => tile.dataset.key)"
    for number, line in enumerate(lines):
        browser.ask(f"document.querySelectorAll('.line')[{number}].click()")
        found, wanted = browser.ask(used), [key for key in shown if key in named(line)]
        if found != wanted:
            yield f"{line!r} shows {found}, wanted {wanted}"


def folding(browser: Browser, facts: dict[str, Any]) -> Iterator[str]:
    """Layers that are alike: another one picked, and each by itself."""
    for number, kind in enumerate(facts["kinds"]):
        if len(kind["layers"]) == 1:
            continue
        last = kind["layers"][-1]
        pick = f"document.querySelector('[data-pick=\"{number}\"]')"
        changed = "new Event('change', {bubbles: true})"
        browser.ask(f"{pick}.value = {last}; {pick}.dispatchEvent({changed})")
        first = next(m["name"] for m in facts["matrices"] if m["kind"] == number)
        if f"{first}{last}" not in [tile["key"] for tile in browser.ask(TILES)]:
            yield f"layer {last} was picked, and {first}{last} is not shown"
        browser.click(*place(browser, f"[data-fold='{number}']"))
    chip = browser.ask("state.chip")
    whole = browser.ask(f"programOf({chip})").split("\n")[1:-1]
    if browser.ask(LINES) != whole:
        yield "with each layer by itself, the text is not the whole program"
    closed = browser.ask("document.querySelectorAll('details.each').length")
    browser.ask("document.querySelectorAll('details.each').forEach(each => each.open = true)")
    browser.ask("new Promise(done => setTimeout(done, 50))")
    shown, wanted = {tile["key"] for tile in browser.ask(TILES)}, set(keys(facts))
    if closed > 0 and shown != wanted:
        yield f"with each layer by itself, {sorted(wanted ^ shown)[:5]} are missing or too many"


# --- The window, its colours, and what the page asks for


COLOURS = """(() => {
    const style = getComputedStyle(document.querySelector(SELECTOR));
    return [style.color, getComputedStyle(document.documentElement).backgroundColor]})()"""


def colours(browser: Browser, path: Path) -> Iterator[str]:
    """Light and dark, as the system prefers and as the reader says; text that can be read."""
    for preferred in ("light", "dark"):
        browser.prefer(preferred)
        browser.open(path)
        for asked, wanted in (("auto", preferred), ("dark", "dark"), ("light", "light")):
            browser.click(*place(browser, f"#theme [data-theme={asked}]"))
            ink, paper = map(_luminance, browser.ask(with_selector(COLOURS, "#lede")))
            if (paper < 0.2) != (wanted == "dark"):
                yield f"{asked} where the system prefers {preferred} is not {wanted}"
            contrast = (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05)
            if contrast < 4.5:
                yield f"{wanted}: a contrast of {contrast:.1f}, wanted 4.5"
        browser.click(*place(browser, "#theme [data-theme=auto]"))
    browser.prefer("light")


def _luminance(colour: str) -> float:
    """The relative luminance of `rgb(r, g, b)`."""
    parts = [int(n) / 255 for n in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def windows(browser: Browser) -> Iterator[str]:
    """No window, however narrow, has the page stand out of it."""
    for width, height in WINDOWS:
        browser.window(width, height)
        wide = browser.ask("document.documentElement.scrollWidth")
        if wide > width:
            yield f"in a window of {width} the page is {wide} wide"


def quiet(browser: Browser) -> Iterator[str]:
    """No errors, and nothing asked of a network."""
    for event in browser.events:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                said = params["exceptionDetails"]
                yield f"an error: {said.get('exception', {}).get('description', said['text'])}"
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                yield f"an error: {params['entry']['text']}"
            case "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "about:")):
                    yield f"it asks for {url}"
