/* Colour scheme, figures and copy buttons. The table of trials is in trials.js. */
"use strict";

const autotune = (function () {
  const byId = (id) => document.getElementById(id);
  const dataOf = (id) => JSON.parse(byId(id).textContent);
  const themes = dataOf("themes");
  const darkScheme = matchMedia("(prefers-color-scheme: dark)");
  const narrowScreen = matchMedia("(max-width: 45rem)");
  const coarsePointer = matchMedia("(pointer: coarse)");

  // -- colours: those of the system, until the reader chooses others ----------------------------

  const themeButton = byId("theme");

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : darkScheme.matches;
  }

  function labelThemeButton() {
    themeButton.textContent = isDark() ? "☀ Light" : "☾ Dark";
    themeButton.setAttribute("aria-label", isDark() ? "Light colours" : "Dark colours");
  }

  function toggleTheme() {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("autotune-theme", document.documentElement.dataset.theme);
    } catch { /* the choice is not stored */ }
    labelThemeButton();
    recolour();
  }

  try {
    const stored = localStorage.getItem("autotune-theme");
    if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
  } catch { /* a page from a file may have no storage */ }
  themeButton.hidden = false;
  themeButton.addEventListener("click", toggleTheme);
  darkScheme.addEventListener("change", () => { labelThemeButton(); recolour(); });
  narrowScreen.addEventListener("change", fitFigures);
  labelThemeButton();

  // -- figures: drawn when they come near the screen ------------------------------------------------------------

  const drawn = new Set();

  function template() { return isDark() ? themes.dark : themes.light; }

  function hasWebGl() {
    try {
      return Boolean(document.createElement("canvas").getContext("webgl"));
    } catch {
      return false;
    }
  }

  function draw(div) {
    const figure = dataOf(div.dataset.figure);
    if (!hasWebGl()) {
      for (const trace of figure.data) if (trace.type === "scattergl") trace.type = "scatter";
    }
    const meta = figure.layout.meta || {};
    if (meta.least_width) div.style.minWidth = `${meta.least_width}px`;
    if (coarsePointer.matches) figure.layout.dragmode = false; // a finger on a figure scrolls the page
    figure.layout.template = template();
    drawn.add(div);
    const settings = {
      responsive: true, displaylogo: false, displayModeBar: narrowScreen.matches ? false : "hover",
      modeBarButtonsToRemove: ["lasso2d", "select2d"],
    };
    return Plotly.newPlot(div, figure.data, figure.layout, settings).then(() => fit(div));
  }

  /* The `meta` of a figure holds the changes of its layout for phones. */
  function fit(div) {
    const meta = div.layout.meta || {};
    const changes = meta[narrowScreen.matches ? "narrow" : "wide"] || {};
    if (changes.height) div.style.height = `${changes.height}px`;
    const wideOnly = meta.wide_only || [];
    const toggled = wideOnly.filter(
      (index) => (div.data[index].visible !== false) === narrowScreen.matches);
    if (!toggled.length && !Object.keys(changes).length) return undefined;
    const traces = toggled.length ? { visible: !narrowScreen.matches } : {};
    return Plotly.update(div, traces, changes, toggled);
  }

  function fitFigures() { drawn.forEach(fit); }

  function recolour() {
    for (const div of drawn) Plotly.react(div, div.data, { ...div.layout, template: template() });
  }

  paper.whenPrinted(() => {
    document.querySelectorAll("[data-figure]").forEach((div) => {
      paper.draw(div, dataOf(div.dataset.figure), themes.light);
    });
    return paper.clear;
  });

  const nearScreen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || drawn.has(entry.target)) continue;
      nearScreen.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "300px" });
  // plotly.js is the last and largest script: everything else can be used before it has been read.
  addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll("[data-figure]").forEach((div) => nearScreen.observe(div));
  });

  // -- copying --------------------------------------------------------------------------------------------------

  let hideTimer;

  function showMessage(text) {
    byId("said").textContent = text;
    clearTimeout(hideTimer);
    hideTimer = setTimeout(() => { byId("said").textContent = ""; }, 4000);
  }

  function copyWithoutClipboard(text) {
    const field = document.createElement("textarea");
    const focused = document.activeElement;
    field.value = text;
    field.className = "hidden";
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    if (focused) focused.focus();
    return done;
  }

  async function copy(text, what) {
    let done = false;
    try {
      await navigator.clipboard.writeText(text);
      done = true;
    } catch {
      done = copyWithoutClipboard(text);
    }
    showMessage(done
      ? `Copied: ${what}`
      : "This browser does not let a page copy: select the command instead.");
    return done;
  }

  function armCopyButton(button) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const pre = button.parentElement.querySelector("pre");
      copy(pre.textContent, pre.getAttribute("aria-label"));
    });
  }

  document.querySelectorAll("button.copy").forEach(armCopyButton);

  return { byId, dataOf, copy, armCopyButton };
})();
