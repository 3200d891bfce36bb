/* Draws the figures of a page with plotly when they come near the screen, in the colours of the page.
   In a report their data and plotly.js are in the page. A server's page fetches both, plotly.js with
   the first figure, and draws a figure again when a trial has ended. */
"use strict";

(function () {
  const MOST_MARKS = 1000; // of a trace that would need a graphics card: more take seconds to draw
  const server = document.querySelector("script[data-plotly]"); // null in a report
  const themes = JSON.parse(document.getElementById("themes").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 45rem)");
  const coarse = matchMedia("(pointer: coarse)");
  const drawn = new Map();
  let loading = null;

  function theme() {
    const chosen = document.documentElement.dataset.theme;
    return (chosen ? chosen === "dark" : dark.matches) ? themes.dark : themes.light;
  }

  function load() {
    if (window.Plotly) return Promise.resolve();
    loading ??= new Promise((done, failed) => {
      const element = document.createElement("script");
      element.src = server.dataset.plotly;
      element.onload = done;
      element.onerror = failed;
      document.head.append(element);
    });
    return loading;
  }

  async function figureOf(div) {
    if (!server) return JSON.parse(document.getElementById(div.dataset.figure).textContent);
    const answer = await fetch(div.dataset.figure, { headers: { Accept: "application/json" } });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.detail);
    return found;
  }

  // -- a figure for this screen ---------------------------------------------------------------------------------

  /* plotly compiles programs for a graphics card with eval, which a server's page does not allow. */
  function hasWebGl() {
    try {
      return !server && Boolean(document.createElement("canvas").getContext("webgl"));
    } catch {
      return false;
    }
  }

  function adapted(figure) {
    const meta = { ...figure.layout.meta };
    for (const trace of figure.data) {
      if (trace.type !== "scattergl" || hasWebGl()) continue;
      trace.type = "scatter";
      const count = trace.x.length;
      const every = Math.ceil(count / MOST_MARKS);
      if (every < 2) continue;
      thin(trace, count, every);
      const shown = `Of ${count.toLocaleString("en")} ${trace.name} trials ${trace.x.length.toLocaleString("en")} are drawn; the table has all.`;
      meta.note = [meta.note, shown].filter(Boolean).join(" ");
    }
    const layout = { ...figure.layout, meta, template: theme(), uirevision: "kept" };
    if (coarse.matches) layout.dragmode = false; // a finger on a figure scrolls the page
    for (const [path, value] of Object.entries((narrow.matches ? meta.narrow : {}) || {})) setPath(layout, path, value);
    const data = figure.data.map((trace, index) =>
      narrow.matches && (meta.wide_only || []).includes(index) ? { ...trace, visible: false } : trace);
    return { data, layout };
  }

  /* Keeps one in so many marks of a trace, with what belongs to each. */
  function thin(values, count, every) {
    for (const [name, value] of Object.entries(values)) {
      if (Array.isArray(value) && value.length === count) values[name] = value.filter((_, index) => index % every === 0);
      else if (value !== null && typeof value === "object" && !Array.isArray(value)) thin(value, count, every);
    }
  }

  /* Sets `legend.y` of a layout without changing that of the figure. */
  function setPath(layout, path, value) {
    const names = path.split(".");
    let place = layout;
    for (const name of names.slice(0, -1)) {
      place[name] = { ...(place[name] || {}) };
      place = place[name];
    }
    place[names.at(-1)] = value;
  }

  const settings = () => ({
    responsive: true, displaylogo: false, displayModeBar: narrow.matches ? false : "hover",
    modeBarButtonsToRemove: ["lasso2d", "select2d", ...(server ? ["toImage"] : [])],
  });

  // -- drawing --------------------------------------------------------------------------------------------------

  async function draw(div) {
    const entry = drawn.get(div);
    if (entry.isBusy) { entry.again = true; return; }
    entry.isBusy = true;
    const began = performance.now();
    try {
      const asked = figureOf(div);
      await Promise.all([load(), asked]);
      entry.figure = await asked;
      await show(div, entry);
    } catch (error) {
      explain(div, entry, error.message || "The figure could not be drawn. Load the page again.");
    }
    entry.isBusy = false;
    entry.took = performance.now() - began;
    if (entry.again) { entry.again = false; later(div); }
  }

  async function show(div, entry) {
    const { data, layout } = adapted(structuredClone(entry.figure));
    if (!entry.hasPlot) div.replaceChildren();
    entry.hasPlot = true;
    if (layout.height) div.style.height = `${layout.height}px`;
    const least = (layout.meta || {}).least_width;
    if (least) div.style.minWidth = `${least}px`;
    await Plotly.react(div, data, layout, settings());
    const caption = div.closest("figure")?.querySelector("figcaption");
    if (caption) caption.textContent = (layout.meta || {}).note || "";
  }

  function explain(div, entry, text) {
    if (entry.hasPlot) return; // the figure of before is better than none
    const place = document.createElement("p");
    place.className = "muted";
    place.textContent = `${text[0].toUpperCase()}${text.slice(1)}.`.replace("..", ".");
    div.replaceChildren(place);
  }

  function later(div) {
    const entry = drawn.get(div);
    if (entry.timer) return;
    entry.timer = setTimeout(() => { entry.timer = 0; if (document.hidden) entry.stale = true; else draw(div); },
      Math.max(1000, 5 * entry.took));
  }

  function showAgain() {
    for (const [div, entry] of drawn) if (entry.hasPlot) show(div, entry);
  }

  const near = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const entry = drawn.get(target);
      if (entry) entry.isNear = isIntersecting;
      if (!isIntersecting) continue;
      if (!entry) {
        drawn.set(target, { isNear: true, took: 0, timer: 0 });
        draw(target);
      } else if (entry.stale) {
        entry.stale = false;
        later(target);
      }
    }
  }, { rootMargin: "300px" });

  // In a report plotly.js is the last and largest script: everything else can be used before.
  document.addEventListener("DOMContentLoaded", () => {
    for (const div of document.querySelectorAll("[data-figure]")) near.observe(div);
  });

  document.addEventListener("autotune:event", ({ detail }) => {
    if (!["trial_ended", "front", "reset"].includes(detail.kind)) return;
    for (const [div, entry] of drawn) {
      if (detail.kind !== "reset" && div.dataset.study !== detail.data.study) continue;
      if (entry.isNear) later(div); else entry.stale = true;
    }
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    for (const [div, entry] of drawn) if (entry.stale && entry.isNear) { entry.stale = false; later(div); }
  });
  document.addEventListener("autotune:theme", showAgain);
  for (const query of [dark, narrow]) query.addEventListener("change", showAgain);

  if (!server) {
    paper.whenPrinted(() => {
      for (const div of document.querySelectorAll("[data-figure]")) {
        paper.draw(div, JSON.parse(document.getElementById(div.dataset.figure).textContent), themes.light);
      }
      return paper.clear;
    });
  }
})();
