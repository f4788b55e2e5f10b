"use strict";

// A click on a column's title sorts by the numbers behind its cells, or by their text; the next
// click turns the order around. Empty cells stay last.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const header = button.parentElement;
    const column = header.cellIndex;
    const body = header.closest("table").tBodies[0];
    const numeric = header.classList.contains("number");
    const before = header.getAttribute("aria-sort");
    const descending = before ? before === "ascending" : numeric;
    for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const keyed = Array.from(body.rows, (row) => {
      const cell = row.cells[column];
      const key = numeric ? parseFloat(cell.dataset.value) : cell.textContent;
      return { row, key, empty: numeric ? Number.isNaN(key) : key === "" };
    });
    keyed.sort((a, b) => {
      if (a.empty || b.empty) return a.empty - b.empty;
      const order = numeric ? a.key - b.key : a.key.localeCompare(b.key, "en", { numeric: true });
      return descending ? -order : order;
    });
    body.append(...keyed.map(({ row }) => row));
  });
}

// Print everything, also what is folded away.
addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
});
