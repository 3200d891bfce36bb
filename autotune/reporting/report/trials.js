/* The table of all trials: sorted, filtered and in pages. Text is inserted as text, never as HTML. */
"use strict";

(function () {
  const { byId, dataOf, copy, armCopyButton, size, seconds } = autotune;
  const data = dataOf("trials-data");
  const PAGE = 25;
  const table = byId("table"), body = table.tBodies[0];
  const heads = [...table.querySelectorAll("thead th[data-key]")];
  const titles = new Map(heads.map((head) => [head.dataset.key, head.textContent.trim()]));
  const front = new Set(data.front);
  const target = byId("target");
  let order = Array.from({ length: data.count }, (_, index) => index);
  let sorting = { key: "number", descending: false };
  let first = 0;

  // -- values ---------------------------------------------------------------------------------------------------

  function repeating(column, index) { return column.values[column.of[index]]; }

  function value(key, index) {
    if (key === "words") return words(index);
    if (key === "outcome") return data.outcomes[repeating(data.repeating.outcome, index)];
    if (key in data.plain) return data.plain[key][index];
    return repeating(data.repeating[key] || data.config[key], index);
  }

  function words(index) {
    const name = repeating(data.repeating.name, index);
    return (name ? `${name}: ` : "") + data.words[index];
  }

  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const hundredths = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

  /* Of less than half a percent two digits, as everywhere in autotune. */
  function percent(share) {
    const amount = 100 * share;
    if (amount > 0.5) return amount.toFixed(0);
    return amount < 0.001 ? "0" : String(Number(amount.toPrecision(2)));
  }

  function speed(amount, index) {
    const spread = data.plain.tokens_per_second_spread[index] || 0;
    return `${whole.format(amount)} ±${percent(spread / amount)}%`;
  }

  function perplexity(amount, index) {
    const spread = data.plain.perplexity_spread[index];
    const text = (value("shares_perplexity", index) ? "=" : "") + hundredths.format(amount);
    return spread === null ? text : `${text} ±${spread.toFixed(2)}`;
  }

  const forms = {
    peak_memory_bytes: size, device_bytes: size, predicted_peak_memory_bytes: size,
    tokens_per_second: speed, model_flops_utilization: (share) => `${percent(share)}%`, perplexity: perplexity, seconds: seconds, compile_seconds: seconds,
  };

  function shown(key, index) {
    const raw = value(key, index);
    if (raw === null || raw === "") return "–";
    return forms[key] ? forms[key](raw, index) : String(raw);
  }

  // -- commands -------------------------------------------------------------------------------------------------

  function configuration(index) {
    return Object.entries(data.config)
      .map(([key, column]) => `${key} = ${JSON.stringify(repeating(column, index))}`)
      .join("\n");
  }

  function fill(template, index) {
    const values = {
      number: () => String(value("number", index)),
      configuration: () => configuration(index),
      target: () => (target ? target.value : ""),
    };
    // Texts are at the even places, names of placeholders at the odd ones.
    return template.map((part, place) => (place % 2 ? values[part]() : part)).join("");
  }

  function commands(index) {
    const number = value("number", index);
    const all = [["Re-run", `the command that re-runs trial ${number}`, fill(data.rerun, index)]];
    if (target) {
      const what = `the command that exports trial ${number} to ${target.value}`;
      all.push(["Export", what, fill(data.export, index)]);
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

  function badges(cell, index) {
    const number = value("number", index);
    const outcome = repeating(data.repeating.outcome, index);
    const all = [];
    if (number === data.pick) all.push("pick");
    if (front.has(number)) all.push("front");
    if (number === data.baseline) all.push("baseline");
    for (const mark of all) cell.append(element("span", mark, { class: `badge ${mark}` }), " ");
    if (outcome !== "ok" || !all.length) {
      const look = outcome === "ok" ? "badge" : "badge failed";
      cell.append(element("span", value("outcome", index), { class: look }));
    }
    const message = value("message", index);
    if (message) cell.append(element("div", message, { class: "note wide-only" }));
    const origin = value("reused_from", index);
    if (origin) cell.append(element("div", `from ${origin}`, { class: "note wide-only" }));
  }

  function describe(cell, index) {
    const name = repeating(data.repeating.name, index);
    if (name) cell.append(element("b", name));
    cell.append(data.words[index]);
  }

  function cellOf(head, index) {
    const key = head.dataset.key;
    if (key === "number") {
      const cell = element("th", null, { scope: "row", role: "rowheader" });
      const number = `#${value("number", index)}`;
      const button = element("button", number, {
        type: "button", class: "open", "aria-expanded": "false", "aria-label": `${number}: all data`,
      });
      button.addEventListener("click", () => toggle(button, index));
      cell.append(button);
      return cell;
    }
    const cell = element("td", null, {
      class: head.className, role: "cell", "data-title": titles.get(key),
    });
    if (key === "outcome") {
      cell.classList.add("marks");
      badges(cell, index);
    } else if (key === "words") {
      cell.classList.add("words");
      describe(cell, index);
    } else {
      cell.textContent = shown(key, index);
    }
    return cell;
  }

  function copiesOf(index) {
    const cell = element("td", null, { class: "copies wide-only", role: "cell" });
    commands(index).forEach(([label], which) => {
      const name = `${label}: copy the command for trial ${value("number", index)}`;
      const button = element("button", label, { type: "button", "aria-label": name });
      button.addEventListener("click", () => {
        const [, what, text] = commands(index)[which]; // the target may have changed
        copy(text, what);
      });
      cell.append(button, " ");
    });
    return cell;
  }

  function rowOf(index) {
    const isPick = value("number", index) === data.pick;
    const row = element("tr", null, { role: "row", class: isPick ? "row picked" : "row" });
    row.append(...heads.map((head) => cellOf(head, index)), copiesOf(index));
    return row;
  }

  // -- the details of a trial --------------------------------------------------------------------

  const LONG = ["message", "perplexity_source", "parity_message", "reused_from"];
  const KNOWN = ["peak_memory_bytes", "device_bytes", "peak_phase", "predicted_peak_memory_bytes",
    "compile_seconds", "seconds", "parity", ...LONG];

  function toggle(button, index) {
    const row = button.closest("tr");
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) row.nextElementSibling.remove();
    else row.after(detailOf(index));
  }

  function ranksOf(index) {
    const peaks = data.peaks_by_rank[value("number", index)] || [];
    const largest = Math.max(...peaks);
    return peaks.map((peak, rank) => {
      const pair = element("div", null, { class: "rank" });
      const bar = element("meter", null, {
        min: "0", max: String(largest), value: String(peak), "aria-label": `Peak of rank ${rank}: ${size(peak)}`,
      });
      const text = element("dd", ` ${size(peak)}${peak === largest ? ", largest" : ""}`);
      text.prepend(bar);
      pair.append(element("dt", `peak of rank ${rank}`), text);
      return pair;
    });
  }

  function detailOf(index) {
    const list = element("dl", null, { class: "known" });
    for (const key of [...Object.keys(data.config), ...KNOWN]) {
      const text = shown(key, index);
      if (text === "–") continue;
      const pair = element("div", null, LONG.includes(key) ? { class: "long" } : {});
      const name = key.replace(/_bytes$/, "").replaceAll("_", " ");
      pair.append(element("dt", name), element("dd", text));
      list.append(pair);
    }
    list.append(...ranksOf(index));
    const sentences = { weights: data.weights, "in collectives": data.communication };
    for (const [name, texts] of Object.entries(sentences)) {
      const text = texts[value("number", index)];
      if (!text) continue;
      const pair = element("div", null, { class: "long" });
      pair.append(element("dt", name), element("dd", text));
      list.append(pair);
    }
    const cell = element("td", null, { colspan: String(heads.length + 1), role: "cell" });
    cell.append(list);
    for (const [, what, text] of commands(index)) {
      const box = element("div", null, { class: "command" });
      const button = element("button", "Copy", {
        type: "button", class: "copy", "aria-label": `Copy ${what}`,
      });
      box.append(element("pre", text, { tabindex: "0", "aria-label": what }), button);
      armCopyButton(button);
      cell.append(element("p", what[0].toUpperCase() + what.slice(1)), box);
    }
    const row = element("tr", null, { class: "detail", role: "row" });
    row.append(cell);
    return row;
  }

  // -- sorting and filtering ------------------------------------------------------------------------------------

  const collator = new Intl.Collator("en", { numeric: true });

  function compare(one, other) {
    if (one === null || one === "") return other === null || other === "" ? 0 : Infinity;
    if (other === null || other === "") return -Infinity;
    return typeof one === "string" ? collator.compare(one, other) : one - other;
  }

  function sort() {
    const direction = sorting.descending ? -1 : 1;
    order.sort((a, b) => {
      const difference = compare(value(sorting.key, a), value(sorting.key, b));
      // Unknown values come last in both directions.
      const isUnknown = Math.abs(difference) === Infinity;
      return (isUnknown ? difference : direction * difference) || a - b;
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

  const textOf = [];

  function searchable(index) {
    return textOf[index] ||= [
      `#${value("number", index)}`, words(index), value("outcome", index), value("message", index),
      value("reused_from", index),
    ].join(" ").toLowerCase();
  }

  const kinds = {
    all: () => true,
    front: (index) => front.has(value("number", index)),
    candidates: (index) => repeating(data.repeating.outcome, index) === "ok",
    others: (index) => repeating(data.repeating.outcome, index) !== "ok",
  };

  function filter() {
    const wanted = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const kind = outcomeSelect.value;
    const isKind = kinds[kind] || ((index) => repeating(data.repeating.outcome, index) === kind);
    order = Array.from({ length: data.count }, (_, index) => index)
      .filter((index) => isKind(index) && wanted.every((word) => searchable(index).includes(word)));
    first = 0;
    sort();
    show();
  }

  function rangeWords(from, to) {
    const among = order.length === data.count ? "" : `, of ${whole.format(data.count)} in all`;
    if (!order.length) return `No trial matches${among}`;
    const range = `${whole.format(from + 1)} to ${whole.format(to)}`;
    return `${range} of ${whole.format(order.length)} trials${among}`;
  }

  function show() {
    const last = Math.min(first + PAGE, order.length);
    body.replaceChildren(...order.slice(first, last).map(rowOf));
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
    body.prepend(...order.slice(start, first).map(rowOf));
    body.append(...order.slice(last, end).map(rowOf));
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
    const count = (name) => order.filter(kinds[name]).length;
    const groups = [
      ["all", "all trials"], ["front", "the front"], ["candidates", "ok"], ["others", "not ok"],
    ];
    for (const [name, title] of groups) {
      outcomeSelect.append(element("option", `${title} (${whole.format(count(name))})`, { value: name }));
    }
    data.repeating.outcome.values.forEach((outcome, code) => {
      if (outcome === "ok") return;
      const amount = data.repeating.outcome.of.filter((other) => other === code).length;
      const title = `${data.outcomes[outcome]} (${whole.format(amount)})`;
      outcomeSelect.append(element("option", title, { value: outcome }));
    });
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
