/* The table of all trials: sorted, filtered and in pages. Its rows are in the page; what a trial shows
   when it is opened is inserted as text, never as HTML. */
"use strict";

(function () {
  const { byId, dataOf, copy, armCopyButton } = autotune;
  const data = dataOf("details");
  const PAGE = 25;
  const table = byId("table"), body = table.tBodies[0];
  const heads = [...table.querySelectorAll("thead th")];
  const titles = new Map(heads.map((head) => [head.dataset.key, head.textContent.trim()]));
  const target = byId("target");
  const rows = [...byId("rows").content.querySelectorAll("tr")];
  const places = new Map(rows.map((row, place) => [row, place]));
  let order = [...rows];
  let sorting = { key: "number", descending: false };
  let first = 0;

  function repeating(column, place) { return column.values[column.of[place]]; }

  function numberOf(row) { return row.dataset.number; }

  // -- commands -------------------------------------------------------------------------------------------------

  function configuration(place) {
    return Object.entries(data.config)
      .map(([key, column]) => `${key} = ${JSON.stringify(repeating(column, place))}`)
      .join("\n");
  }

  function fill(template, row) {
    const values = {
      number: () => numberOf(row),
      configuration: () => configuration(places.get(row)),
      target: () => (target ? target.value : ""),
    };
    // Texts are at the even places, names of placeholders at the odd ones.
    return template.map((part, place) => (place % 2 ? values[part]() : part)).join("");
  }

  function commands(row) {
    const number = numberOf(row);
    const all = [["Re-run", `the command that re-runs trial ${number}`, fill(data.rerun, row)]];
    if (target) {
      const what = `the command that exports trial ${number} to ${target.value}`;
      all.push(["Export", what, fill(data.export, row)]);
    }
    return all;
  }

  // -- drawing --------------------------------------------------------------------------------------------------

  function element(tag, text, attributes = {}) {
    const made = document.createElement(tag);
    if (text !== null) made.textContent = text;
    for (const [name, content] of Object.entries(attributes)) made.setAttribute(name, content);
    return made;
  }

  function copiesOf(row) {
    const cell = element("td", null, { class: "copies wide-only", role: "cell" });
    commands(row).forEach(([label], which) => {
      const name = `${label}: copy the command for trial ${numberOf(row)}`;
      const button = element("button", label, { type: "button", "aria-label": name });
      button.addEventListener("click", () => {
        const [, what, text] = commands(row)[which]; // the target may have changed
        copy(text, what);
      });
      cell.append(button, " ");
    });
    return cell;
  }

  /* Give a row that is shown for the first time what can be selected. */
  function armed(row) {
    if (row.querySelector(".open")) return row;
    const number = row.querySelector("th");
    const button = element("button", number.textContent, {
      type: "button", class: "open", "aria-expanded": "false", "aria-label": `#${numberOf(row)}: all data`,
    });
    button.addEventListener("click", () => toggle(button, row));
    number.replaceChildren(button);
    row.classList.add("row");
    row.append(copiesOf(row));
    return row;
  }

  // -- the details of a trial --------------------------------------------------------------------

  const LONG = 40; // characters of a text that needs a line of its own

  function toggle(button, row) {
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) row.nextElementSibling.remove();
    else row.after(detailOf(row));
  }

  function close(row) {
    const button = row.querySelector(".open");
    if (button) button.setAttribute("aria-expanded", "false");
  }

  function pairOf(name, text) {
    const pair = element("div", null, text.length > LONG ? { class: "long" } : {});
    pair.append(element("dt", name), element("dd", text));
    return pair;
  }

  function rankOf({ rank, text, share }) {
    const pair = element("div", null, { class: "rank" });
    const bar = element("meter", null, {
      min: "0", max: "1", value: String(share), "aria-label": `Peak of rank ${rank}: ${text}`,
    });
    const size = element("dd", ` ${text}${share === 1 ? ", largest" : ""}`);
    size.prepend(bar);
    pair.append(element("dt", `peak of rank ${rank}`), size);
    return pair;
  }

  function detailOf(row) {
    const place = places.get(row);
    const list = element("dl", null, { class: "known" });
    for (const [key, column] of Object.entries(data.config)) {
      list.append(pairOf(key.replaceAll("_", " "), String(repeating(column, place))));
    }
    for (const [name, column] of Object.entries(data.facts)) {
      const text = repeating(column, place);
      if (text) list.append(pairOf(name, text));
    }
    list.append(...(data.ranks[numberOf(row)] || []).map(rankOf));
    const cell = element("td", null, { colspan: String(heads.length + 1), role: "cell" });
    cell.append(list);
    for (const [, what, text] of commands(row)) {
      const box = element("div", null, { class: "command" });
      const button = element("button", "Copy", {
        type: "button", class: "copy", "aria-label": `Copy ${what}`,
      });
      box.append(element("pre", text, { tabindex: "0", "aria-label": what }), button);
      armCopyButton(button);
      cell.append(element("p", what[0].toUpperCase() + what.slice(1)), box);
    }
    const detail = element("tr", null, { class: "detail", role: "row" });
    detail.append(cell);
    return detail;
  }

  // -- sorting and filtering ------------------------------------------------------------------------------------

  const collator = new Intl.Collator("en", { numeric: true });

  /* The value of a cell; null where it is not known. */
  function valueOf(row, key) {
    const cell = row.cells[heads.findIndex((head) => head.dataset.key === key)];
    if (!("value" in cell.dataset)) return cell.matches(".number, th") ? null : cell.textContent;
    return Number(cell.dataset.value);
  }

  function compare(one, other) {
    return typeof one === "string" ? collator.compare(one, other) : one - other;
  }

  function sort() {
    const direction = sorting.descending ? -1 : 1;
    const values = new Map(order.map((row) => [row, valueOf(row, sorting.key)]));
    order.sort((a, b) => {
      const one = values.get(a), other = values.get(b);
      // Unknown values come last in both directions.
      if (one === null || other === null) return (one === null) - (other === null) || places.get(a) - places.get(b);
      return direction * compare(one, other) || places.get(a) - places.get(b);
    });
    for (const head of heads) {
      if (head.dataset.key === sorting.key) {
        head.setAttribute("aria-sort", sorting.descending ? "descending" : "ascending");
      } else {
        head.removeAttribute("aria-sort");
      }
    }
    sortSelect.value = `${sorting.key} ${sorting.descending ? "down" : "up"}`;
  }

  const textOf = new Map();

  function searchable(row) {
    if (!textOf.has(row)) textOf.set(row, row.textContent.toLowerCase());
    return textOf.get(row);
  }

  const kinds = {
    all: () => true,
    front: (row) => "front" in row.dataset,
    candidates: (row) => row.dataset.outcome === "ok",
    others: (row) => row.dataset.outcome !== "ok",
  };

  function filter() {
    const wanted = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const kind = outcomeSelect.value;
    const isKind = kinds[kind] || ((row) => row.dataset.outcome === kind);
    order = rows.filter((row) => isKind(row) && wanted.every((word) => searchable(row).includes(word)));
    first = 0;
    sort();
    show();
  }

  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

  function rangeWords(from, to) {
    const among = order.length === rows.length ? "" : `, of ${whole.format(rows.length)} in all`;
    if (!order.length) return `No trial matches${among}`;
    const range = `${whole.format(from + 1)} to ${whole.format(to)}`;
    return `${range} of ${whole.format(order.length)} trials${among}`;
  }

  function show() {
    const last = Math.min(first + PAGE, order.length);
    const shown = order.slice(first, last).map(armed);
    shown.forEach(close);
    body.replaceChildren(...shown);
    byId("shown").textContent = rangeWords(first, last);
    byId("before").disabled = first === 0;
    byId("after").disabled = last === order.length;
  }

  /* On paper there is no next page to turn to: print the other rows as well. */
  const MOST_PRINTED = 500;

  function showForPaper() {
    const onScreen = [...body.childNodes], words = byId("shown").textContent;
    const last = Math.min(first + PAGE, order.length);
    const start = order.length > MOST_PRINTED ? first : 0;
    const end = Math.min(start + MOST_PRINTED, order.length);
    body.prepend(...order.slice(start, first).map(armed));
    body.append(...order.slice(last, end).map(armed));
    byId("shown").textContent = rangeWords(start, end);
    return () => {
      body.replaceChildren(...onScreen);
      byId("shown").textContent = words;
    };
  }

  function turn(by) {
    first += by;
    show();
    byId("trials").scrollIntoView();
  }

  // -- controls -------------------------------------------------------------------------------------------------

  const outcomeSelect = byId("outcome"), sortSelect = byId("sort");

  function fillOutcomes() {
    const outcomes = new Set(rows.map((row) => row.dataset.outcome).filter((outcome) => outcome !== "ok"));
    const groups = [
      ["all", "all trials"], ["front", "the front"], ["candidates", "ok"], ["others", "not ok"],
      ...[...outcomes].map((outcome) => [outcome, data.outcomes[outcome]]),
    ];
    for (const [name, title] of groups) {
      const isKind = kinds[name] || ((row) => row.dataset.outcome === name);
      const label = `${title} (${whole.format(rows.filter(isKind).length)})`;
      outcomeSelect.append(element("option", label, { value: name }));
    }
  }

  for (const head of heads) {
    const key = head.dataset.key, title = titles.get(key);
    head.querySelector("button").addEventListener("click", () => {
      sorting = { key, descending: sorting.key === key && !sorting.descending };
      sort();
      first = 0;
      show();
    });
    sortSelect.append(element("option", `${title}, lowest first`, { value: `${key} up` }));
    sortSelect.append(element("option", `${title}, highest first`, { value: `${key} down` }));
  }
  table.tHead.rows[0].append(element("th", "copy", { class: "copies wide-only", scope: "col", role: "columnheader" }));
  sortSelect.addEventListener("change", () => {
    const [key, direction] = sortSelect.value.split(" ");
    sorting = { key, descending: direction === "down" };
    sort();
    first = 0;
    show();
  });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("find").addEventListener("input", filter);
  outcomeSelect.addEventListener("change", filter);
  if (target) target.addEventListener("change", show);
  byId("before").addEventListener("click", () => turn(-PAGE));
  byId("after").addEventListener("click", () => turn(PAGE));

  fillOutcomes();
  sort();
  show();
  paper.whenPrinted(showForPaper);
  for (const id of ["filters", "table", "pages"]) byId(id).hidden = false;
})();
