"""report.html in a real browser, headless: tables sort and filter, nothing runs that should not, narrow windows and print hold.

A script is added to a copy of the page; it works the page as a reader would and leaves what it saw in the document.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from reports.render import render
from tests.reports.test_render import HOSTILE, make_run, record

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
NAMES = ("ten", "nine", "eleven", "hundred", "one", "two", "three", "four", "five", "six")
VALUES = (10, 9, 11, 100, 1, 2, 3, 4, 5, 6)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    table = {
        "title": "Numbers",
        "columns": ["name", "value", "text"],
        "rows": [[n, v, HOSTILE] for n, v in zip(NAMES, VALUES, strict=True)],
    }
    wide = {"title": "Wide", "columns": [f"c{i}" for i in range(12)], "rows": [["a rather long word and another one"] * 12]}
    records = [record("numerics.a", 0, details={"tables": [table, wide]}), *(record("numerics.a", n) for n in range(1, 12))]
    return render(make_run(tmp_path_factory.mktemp("run"), records))["html"]


def run_browser(folder: Path, *arguments: str) -> str:
    options = [
        "--headless=new",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=2000",
        f"--user-data-dir={folder / 'profile'}",
    ]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []
    done = subprocess.run([str(BROWSER), *options, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def probe(page: Path, folder: Path, script: str, width: int = 1280):
    """What `script`, the body of a function, returns in a window of that width."""
    copy = folder / "page.html"
    body = f"<script>const seen = (() => {{ {script} }})(); document.title = 'seen:' + JSON.stringify(seen);</script></body>"
    copy.write_text(page.read_text().replace("</body>", body))
    dom = run_browser(folder, f"--window-size={width},900", "--dump-dom", copy.as_uri())
    found = re.search(r"<title>seen:(.*?)</title>", dom, re.S)
    assert found, dom[:300]
    return json.loads(html.unescape(found.group(1)))


TABLE = """
const table = [...document.querySelectorAll("h3")].find(h => h.textContent === "Numbers").parentNode
  && [...document.querySelectorAll("table[data-sortable]")].find(t => t.tHead.rows[0].cells[1].textContent === "value");
const column = place => [...table.tBodies[0].rows].filter(r => !r.hidden).map(r => r.cells[place].textContent);
const head = table.tHead.rows[0].cells;
"""


def test_tables_sort_by_number_and_by_word_and_back(page, tmp_path):
    seen = probe(page, tmp_path, TABLE + """
        head[1].click(); const up = column(1); head[1].click(); const down = column(1), mark = head[1].getAttribute("aria-sort");
        head[0].dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"})); const words = column(0);
        return {up, down, mark, words, old: head[1].getAttribute("aria-sort")};""")  # fmt: skip
    assert [int(v) for v in seen["up"]] == sorted(VALUES)
    assert [int(v) for v in seen["down"]] == sorted(VALUES, reverse=True)
    assert seen["mark"] == "descending"
    assert seen["words"] == sorted(NAMES)
    assert seen["old"] is None


def test_tables_filter_by_any_text_and_show_everything_again(page, tmp_path):
    seen = probe(page, tmp_path, TABLE + """
        const field = table.parentNode.querySelector("input.filter");
        const type = text => { field.value = text; field.dispatchEvent(new Event("input")); return column(0); };
        return {label: field.placeholder, e: type("EV"), none: type("no such text"), all: type("").length};""")  # fmt: skip
    assert seen == {"label": f"filter {len(NAMES)} rows", "e": ["eleven"], "none": [], "all": len(NAMES)}


def test_hostile_text_runs_nothing_and_loads_nothing(page, tmp_path):
    seen = probe(page, tmp_path, """
        return {scripts: document.scripts.length, images: document.images.length, bold: document.querySelectorAll("td script").length,
                links: [...document.links].map(a => a.getAttribute("href")).filter(h => !h.startsWith("#")),
                shown: document.body.textContent.includes("<scr" + "ipt>alert(1)</scr" + "ipt>"),
                requests: performance.getEntriesByType("resource").length};""")  # fmt: skip
    assert seen == {"scripts": 2, "images": 0, "bold": 0, "links": [], "shown": True, "requests": 0}


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_fits_its_window_and_ids_stay_whole(page, tmp_path, width):
    seen = probe(page, tmp_path, """
        const lines = node => node.getClientRects().length;
        return {over: document.documentElement.scrollWidth - innerWidth, ids: document.querySelectorAll(".id").length,
                broken: [...document.querySelectorAll(".id")].filter(n => lines(n) > 1).length,
                twice: (ids => ids.length - new Set(ids).size)([...document.querySelectorAll("[id]")].map(n => n.id)),
                wide: [...document.querySelectorAll(".scroll")].some(n => n.scrollWidth > n.clientWidth)};""", width)  # fmt: skip
    assert seen["over"] <= 0
    assert seen["ids"] >= 3
    assert (seen["broken"], seen["twice"]) == (0, 0)
    assert seen["wide"] is (width == 500)


def test_it_prints(page, tmp_path):
    paper = tmp_path / "page.pdf"
    run_browser(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={paper}", page.as_uri())
    assert paper.read_bytes().startswith(b"%PDF")
