"use strict";

// Tables are sorted by a click on a column's title. Long ones get a search box; those with an index
// (packed by report/html.py) are also grouped, filtered by flags and facets, and open details below
// a row. Everything is inserted into the page as text, never as markup.

const LONG = 25; // tables with more rows can be searched
const FEW = 120; // up to this many rows, groups start open
const UNITS = { k: 2 ** 10, m: 2 ** 20, g: 2 ** 30 };
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...children);
  return found;
}

class Explorer {
  constructor(table) {
    this.table = table;
    this.columns = Array.from(table.tHead.rows[0].cells);
    this.index = table.dataset.index
      ? JSON.parse(document.getElementById(table.dataset.index).textContent)
      : null;
    this.home = this.index ? table.closest(".explorer").id : "";
    this.noun = this.index ? this.index.noun : "rows";
    this.rows = Array.from(table.tBodies[0].rows, (row, number) => this.record(row, number));
    this.query = "";
    this.flags = new Set();
    this.chosen = new Map(); // facet number -> value number
    this.by = this.index ? 0 : -1; // the facet that groups, or -1
    this.sort = null;
    this.opened = new Map(); // group name -> whether the user opened or closed it
    for (const header of this.columns) {
      header.firstElementChild.addEventListener("click", () => this.sortBy(header));
    }
    if (this.index || this.rows.length > LONG) this.addTools();
    if (this.index) {
      this.readAddress();
      addEventListener("hashchange", () => this.readAddress());
      this.show();
    }
  }

  record(row, number) {
    const known = this.index ? this.index.rows[number] : [[], [], []];
    const facets = known[0].map((value, facet) => this.index.facets[facet].values[value]);
    const text = `${row.textContent} ${facets.join(" ")}`.toLowerCase();
    return { row, facets, text, values: known[0], flags: new Set(known[1]), parts: known[2] };
  }

  // Tools above the table

  addTools() {
    const search = make("input", {
      type: "search",
      placeholder: this.index ? `Search: ${this.example()}` : "Search",
      "aria-label": `Search ${this.noun}: words, -words to exclude, column>number`,
      spellcheck: "false",
    });
    search.addEventListener("input", () => {
      this.query = search.value;
      this.changed();
    });
    search.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      search.value = this.query = "";
      this.changed();
    });
    this.search = search;
    this.count = make("output", { "aria-live": "polite" });
    const tools = make("div", { class: "tools", role: "search" }, search);
    this.chips = new Map();
    this.selects = [];
    if (this.index) {
      const chips = make("div", { class: "chips", role: "group", "aria-label": "Only" });
      for (const [flag, title] of this.index.flags) {
        const number = this.rows.filter((each) => each.flags.has(flag)).length;
        const chip = make("button", { type: "button", "aria-pressed": "false" }, title, " ");
        chip.append(make("b", {}, number.toLocaleString("en")));
        chip.addEventListener("click", () => {
          if (!this.flags.delete(flag)) this.flags.add(flag);
          this.changed();
        });
        this.chips.set(flag, chip);
        chips.append(chip);
      }
      const choices = make("div", { class: "choices" });
      this.index.facets.forEach((facet, number) => {
        const options = facet.values.map((value, place) => [place, value]);
        options.sort((a, b) => a[1].localeCompare(b[1], "en", { numeric: true }));
        const select = this.select(facet.name, [["", "all"], ...options], (value) => {
          if (value === "") this.chosen.delete(number);
          else this.chosen.set(number, Number(value));
          this.changed();
        });
        this.selects.push(select);
        if (facet.values.length > 1) choices.append(select.parentElement);
      });
      const groups = this.index.facets.map((facet, number) => [number, facet.name]);
      this.grouping = this.select("group by", [...groups, [-1, "nothing"]], (value) => {
        this.by = Number(value);
        this.opened.clear();
        this.changed();
      });
      this.toggle = make("button", { type: "button" });
      this.toggle.addEventListener("click", () => {
        const open = !this.allOpen;
        for (const name of this.names) this.opened.set(name, open);
        this.show();
      });
      choices.append(this.grouping.parentElement, this.toggle);
      // On a phone these start closed.
      const more = make("details", {}, make("summary", {}, "filter and group"), choices);
      more.open = matchMedia("(min-width: 40.01rem)").matches;
      tools.append(chips, more);
    }
    tools.append(this.count);
    this.table.parentElement.before(tools);
    this.tell(this.rows.length);
  }

  // An example search: a word, a word to exclude, a condition on a column.
  example() {
    const column = this.columns.find((header) => header.classList.contains("number"));
    const words = this.index.facets.map((facet) => facet.values[0]);
    return `${words[0]} -${words.at(-1).split(" ")[0]} ${nameOf(column)}>100`;
  }

  select(name, options, chosen) {
    const select = make("select");
    for (const [value, title] of options) select.append(make("option", { value }, title));
    select.addEventListener("change", () => chosen(select.value));
    make("label", {}, `${name} `, select);
    return select;
  }

  changed() {
    this.writeAddress();
    this.show();
  }

  // The address stores the search: #anchor?q=...&flag=...&facet=...&by=...

  readAddress() {
    const [anchor, rest = ""] = location.hash.slice(1).split("?");
    if (anchor !== this.home) return;
    const wanted = new URLSearchParams(rest);
    this.query = this.search.value = wanted.get("q") || "";
    this.flags = new Set(wanted.getAll("flag").filter((flag) => this.chips.has(flag)));
    this.chosen.clear();
    this.index.facets.forEach((facet, number) => {
      const value = facet.values.indexOf(wanted.get(facet.name));
      if (value >= 0) this.chosen.set(number, value);
    });
    const by = this.index.facets.findIndex((facet) => facet.name === wanted.get("by"));
    this.by = wanted.get("by") === "nothing" ? -1 : Math.max(by, 0);
    this.opened.clear();
    this.show();
    document.getElementById(this.home).scrollIntoView();
  }

  writeAddress() {
    if (!this.index) return;
    const kept = new URLSearchParams();
    if (this.query) kept.set("q", this.query);
    for (const flag of this.flags) kept.append("flag", flag);
    for (const [number, value] of this.chosen) {
      kept.set(this.index.facets[number].name, this.index.facets[number].values[value]);
    }
    if (this.by) kept.set("by", this.by < 0 ? "nothing" : this.index.facets[this.by].name);
    const rest = kept.toString();
    history.replaceState(null, "", `#${this.home}${rest ? `?${rest}` : ""}`);
  }

  // Selecting and sorting rows

  conditions() {
    return this.query.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
      const match = /^([^<>=]+)(<=|>=|<|>|=)([\d.]+)([kmg])?(?:i?b)?%?$/.exec(word);
      const column = match && this.columns.findIndex((each) => nameOf(each).includes(match[1]));
      if (match && column >= 0) {
        const number = Number(match[3]) * (UNITS[match[4]] || 1);
        return (each) => compare(valueOf(each.row.cells[column]), match[2], number);
      }
      if (word.length > 1 && word[0] === "-") return (each) => !each.text.includes(word.slice(1));
      return (each) => each.text.includes(word);
    });
  }

  kept() {
    const conditions = this.conditions();
    const found = this.rows.filter(
      (each) =>
        [...this.flags].every((flag) => each.flags.has(flag)) &&
        [...this.chosen].every(([facet, value]) => each.values[facet] === value) &&
        conditions.every((holds) => holds(each)),
    );
    return this.sort ? this.sorted(found) : found;
  }

  sortBy(header) {
    const numeric = header.classList.contains("number");
    const before = header.getAttribute("aria-sort");
    const descending = before ? before === "ascending" : numeric;
    for (const other of this.columns) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    this.sort = { column: header.cellIndex, numeric, descending };
    this.show();
  }

  // Sorts by the numbers behind cells, or by their text; empty cells come last.
  sorted(records) {
    const { column, numeric, descending } = this.sort;
    const keyed = records.map((each) => {
      const cell = each.row.cells[column];
      const key = numeric ? parseFloat(cell.dataset.value) : cell.textContent;
      return { each, key, empty: numeric ? Number.isNaN(key) : key === "" };
    });
    keyed.sort((a, b) => {
      if (a.empty || b.empty) return a.empty - b.empty;
      const order = numeric ? a.key - b.key : a.key.localeCompare(b.key, "en", { numeric: true });
      return descending ? -order : order;
    });
    return keyed.map(({ each }) => each);
  }

  // Showing rows

  show() {
    const kept = this.kept();
    const bodies = this.by < 0 ? [this.body(kept)] : this.groups(kept);
    for (const body of Array.from(this.table.tBodies)) body.remove();
    if (!kept.length) bodies.push(this.nothing());
    this.table.append(...bodies);
    if (!this.count) return;
    this.tell(kept.length);
    for (const [flag, chip] of this.chips) chip.setAttribute("aria-pressed", this.flags.has(flag));
    this.selects.forEach((select, number) => {
      select.value = this.chosen.has(number) ? this.chosen.get(number) : "";
    });
    if (!this.index) return;
    this.grouping.value = this.by;
    this.toggle.hidden = this.by < 0;
    this.toggle.textContent = this.allOpen ? "close all" : "open all";
  }

  tell(kept) {
    const [all, some] = [this.rows.length, kept].map((number) => number.toLocaleString("en"));
    this.count.textContent = all === some ? `${all} ${this.noun}` : `${some} of ${all} ${this.noun}`;
  }

  nothing() {
    const cell = make("td", { colspan: this.columns.length, class: "nothing" });
    cell.append(`No ${this.noun} match.`);
    return make("tbody", {}, make("tr", {}, cell));
  }

  body(records) {
    const body = make("tbody");
    for (const each of records) {
      this.prepare(each);
      body.append(each.row);
      if (each.details) body.append(each.details);
    }
    return body;
  }

  groups(kept) {
    const members = new Map();
    for (const each of kept) {
      const name = each.facets[this.by];
      if (!members.has(name)) members.set(name, []);
      members.get(name).push(each);
    }
    this.names = [...members.keys()];
    const isOpen = (name) => this.opened.get(name) ?? kept.length <= FEW;
    this.allOpen = this.names.every(isOpen);
    return [...members].map(([name, records]) => {
      const open = isOpen(name);
      const body = open ? this.body(records) : make("tbody");
      body.prepend(this.heading(name, records, open));
      return body;
    });
  }

  heading(name, records, open) {
    const button = make("button", { type: "button", "aria-expanded": open }, ...breakable(name));
    const title = make("th", { scope: "rowgroup" }, button, " ");
    title.append(make("small", {}, records.length.toLocaleString("en")));
    const row = make("tr", { class: open ? "group open" : "group" }, title);
    for (const [number, header] of this.columns.entries()) {
      if (number) row.append(range(records, number, header.className));
    }
    row.addEventListener("click", () => {
      this.opened.set(name, !open);
      const had = document.activeElement === button;
      this.show();
      if (!had) return;
      const again = [...this.table.querySelectorAll(".group button")];
      again.find((each) => each.textContent === name)?.focus();
    });
    return row;
  }

  // Details

  prepare(each) {
    if (each.ready) return;
    each.ready = true;
    for (const cell of each.row.querySelectorAll("[data-shares]")) {
      cell.append(bar(cell.dataset.shares.split(",").map((part) => part.split(":"))));
    }
    if (!each.parts.length) return;
    const first = each.row.cells[0];
    each.button = make("button", { type: "button", class: "more", "aria-expanded": "false" });
    each.button.setAttribute("aria-label", `Details of ${first.textContent}`);
    first.prepend(each.button);
    each.row.classList.add("openable");
    each.row.addEventListener("click", () => {
      if (String(getSelection())) return; // the user is selecting text
      const open = !each.details;
      each.button.setAttribute("aria-expanded", open);
      if (open) each.row.after((each.details = this.details(each)));
      else {
        each.details.remove();
        each.details = null;
      }
    });
  }

  details(each) {
    const parts = each.parts.map((number) => detail(this.index.details[number]));
    const grid = make("div", { class: "detail" }, ...parts);
    return make("tr", { class: "details" }, make("td", { colspan: this.columns.length }, grid));
  }
}

// A column's name as written in a search, where blanks separate words.
function nameOf(header) {
  return header.textContent.toLowerCase().replaceAll(" ", "");
}

// Long names should break after an underscore.
function breakable(name) {
  return name.split(/(?<=_)/).flatMap((part) => [part, make("wbr")]);
}

// The number as displayed: 25 if the cell says 25%.
function valueOf(cell) {
  const value = parseFloat(cell.dataset.value);
  return cell.textContent.includes("%") ? 100 * value : value;
}

function compare(value, sign, number) {
  if (sign === "<") return value < number;
  if (sign === ">") return value > number;
  if (sign === "<=") return value <= number;
  if (sign === ">=") return value >= number;
  return value === number;
}

// The smallest and the largest value of a numeric column, as written in its cells.
function range(records, column, className) {
  let [low, high] = [null, null];
  for (const each of records) {
    const cell = each.row.cells[column];
    const value = parseFloat(cell.dataset.value);
    if (Number.isNaN(value)) continue;
    if (!low || value < low.value) low = { value, cell };
    if (!high || value > high.value) high = { value, cell };
  }
  const found = make("td", { class: className });
  if (!low) return found;
  const [from, to] = [low, high].map(({ cell }) => cell.firstChild.textContent.trim());
  found.textContent = from === to ? from : `${from} – ${to}`;
  if (high.cell.classList.contains("bad")) found.classList.add("bad");
  return found;
}

function bar(parts) {
  const found = make("span", { class: "shares", "aria-hidden": "true" });
  for (const [colour, percent] of parts) {
    const part = make("i", { class: colour });
    part.style.width = `${percent}%`;
    found.append(part);
  }
  return found;
}

function detail(part) {
  const found = make("section", {}, make("h4", {}, part.title));
  if (part.shares) found.append(...shares(part.shares));
  else if (part.percents) found.append(curve(part), make("p", { class: "caption" }, part.note));
  else found.append(facts(part));
  if (part.header && part.header.length > 2) found.className = "broad";
  return found;
}

function facts({ header, rows }) {
  const table = make("table", { class: "plain" });
  if (header.length) {
    const titles = header.map((title) => make("th", { scope: "col" }, title));
    table.append(make("thead", {}, make("tr", {}, ...titles)));
  }
  const body = make("tbody");
  for (const row of rows) {
    const cells = row.map((text, number) => make("td", { "data-title": header[number] || "" }, text));
    body.append(make("tr", {}, ...cells));
  }
  table.append(body);
  return table;
}

function shares(parts) {
  const whole = parts.reduce((sum, part) => sum + part[2], 0) || 1;
  const list = make("ul", { class: "legend" });
  for (const [colour, name, count] of parts) {
    const item = make("li", {}, make("span", { class: `swatch ${colour}` }), `${name} `);
    const percent = (100 * count / whole).toFixed(count < whole / 100 ? 1 : 0);
    item.append(make("b", {}, `${percent}%`), ` ${count.toLocaleString("en")}`);
    list.append(item);
  }
  return [bar(parts.map(([colour, , count]) => [colour, 100 * count / whole])), list];
}

function curve({ title, first, step, percents, marked }) {
  const draw = (name, attributes, text = "") => {
    const found = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
    found.append(text);
    return found;
  };
  const last = first + step * (percents.length - 1);
  const x = (value) => 38 + (value / last) * 264;
  const y = (percent) => 96 - percent * 0.84;
  const plot = draw("svg", { viewBox: "0 0 320 120", role: "img", class: "figure curve-figure" });
  plot.setAttribute("aria-label", `${title}: ${percents[(marked - first) / step]}% at ${marked}`);
  for (const percent of [0, 50, 100]) {
    const line = { x1: 38, x2: 302, y1: y(percent), y2: y(percent), class: percent ? "grid" : "axis" };
    const label = { x: 33, y: y(percent) + 4, class: "tick", "text-anchor": "end" };
    plot.append(draw("line", line), draw("text", label, `${percent}%`));
  }
  for (const value of [256, 512, 768, 1024].filter((value) => value <= last)) {
    const label = { x: x(value), y: 113, class: "tick", "text-anchor": "middle" };
    plot.append(draw("text", label, value));
  }
  const points = percents.map((percent, place) => `${x(first + step * place)} ${y(percent)}`);
  plot.append(draw("path", { d: `M${points.join("L")}`, class: "curve colour-0" }));
  const here = percents[Math.round((marked - first) / step)];
  if (here !== undefined) {
    const mark = { x1: x(marked), x2: x(marked), y1: y(0), y2: y(100), class: "mark" };
    const dot = { cx: x(marked), cy: y(here), r: 4, class: "dot colour-0" };
    plot.append(draw("line", mark), draw("circle", dot));
  }
  return plot;
}

const explorers = Array.from(document.querySelectorAll("table"), (table) => new Explorer(table));

// "/" focuses the first search box.
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea")) return;
  const found = explorers.find((each) => each.search && each.search.checkVisibility());
  if (!found) return;
  event.preventDefault();
  found.search.focus();
});

// Printing includes folded content.
addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
});
