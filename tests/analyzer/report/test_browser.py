"""The page in a browser: no console errors, nothing wider than a phone, working tables."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cukit.analyzer.report import generate_report
from tests.analyzer.report import samples

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)

pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="needs chromium (Debian: apt-get install chromium)"
)

PROBE = """
<script>
for (const fold of document.querySelectorAll("details")) fold.open = true;
const shown = (name) => getComputedStyle(document.querySelector(name)).display !== "none";
const tables = [...document.querySelectorAll("table")];
const kernels = document.querySelector("table[data-index^=variants]");
const column = [...kernels.rows[0].cells].find((cell) => cell.textContent === "registers");
const sorted = () => {
  column.firstChild.click();
  return visible().map((row) => row.cells[column.cellIndex].textContent);
};
const visible = () => [...kernels.querySelectorAll("tr.openable")];
const search = kernels.closest(".explorer").querySelector("input");
const searched = (words) => {
  search.value = words;
  search.dispatchEvent(new Event("input"));
  return visible().length;
};
const details = () => {
  const last = visible().at(-1);
  last.click();
  const found = last.nextElementSibling.textContent;
  last.click();
  return found;
};
const flagged = () => {
  location.hash = document.querySelector(".tiles a[href*=spills]").getAttribute("href");
  dispatchEvent(new HashChangeEvent("hashchange"));
  return visible().length;
};
const small = (drawing) =>
  drawing.checkVisibility() && drawing.getBoundingClientRect().width < 100;
parent.postMessage({
  width: innerWidth,
  overflow: document.documentElement.scrollWidth - innerWidth,
  wide: shown(".wide"), narrow: shown(".narrow"),
  orders: [sorted(), sorted()],
  searches: ["", "float32", "-float32", "registers>=128 occupancy<50", "shared>1k", "sm_80"]
    .map(searched),
  all_again: searched(""),
  details: details(),
  flagged: flagged(),
  groups: kernels.querySelectorAll("tr.group").length,
  too_small: [...document.querySelectorAll("svg")].filter(small).length,
}, "*");
</script>
"""
"""A script that inspects the page and reports to the frame around it."""

FRAME = """<!doctype html>
<script>
addEventListener("message", (event) => {
  document.body.dataset.found = JSON.stringify(event.data);
});
</script>
<body><iframe src="report.html" style="width: {width}px; height: 900px; border: 0"></iframe>
"""
"""A page with an iframe of a given width; a browser window cannot be as narrow as a phone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a page of all sections, which ends in the probe."""
    report = generate_report(samples.every_kind())
    path = tmp_path_factory.mktemp("page")
    page = report.to_html().replace("</body>", f"{PROBE}</body>")
    (path / "report.html").write_text(page, encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "is_phone"), [(1280, False), (390, True)])
def test_the_page_works_in_chromium(
    folder: Path, width: int, is_phone: bool, tmp_path: Path
) -> None:
    frame = folder / f"{width}.html"
    frame.write_text(FRAME.replace("{width}", str(width)))
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        "--disable-background-networking", "--virtual-time-budget=5000", "--window-size=1400,1000",
        f"--user-data-dir={tmp_path}", "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stderr.splitlines() if "CONSOLE" in line] == []
    match = re.search(r'data-found="(.*?)"', result.stdout)
    assert match is not None, result.stdout
    found = json.loads(html.unescape(match[1]))
    assert found["width"] == width
    assert found["overflow"] <= 0
    assert (found["wide"], found["narrow"]) == (not is_phone, is_phone)
    assert found["too_small"] == 0
    assert found["orders"] == [["128", "32"], ["32", "128"]]
    assert found["searches"] == [2, 1, 1, 1, 0, 0]
    assert found["all_again"] == 2
    for words in ("Advice", "floating point 60% 300", "load, 16 bytes", "layers/rms_norm.cu"):
        assert words in found["details"]
    assert (found["flagged"], found["groups"]) == (1, 1)
