/* Colour scheme and copy buttons. The table of trials is in trials.js, figures are in figures.js. */
"use strict";

const autotune = (function () {
  const byId = (id) => document.getElementById(id);
  const dataOf = (id) => JSON.parse(byId(id).textContent);
  const darkScheme = matchMedia("(prefers-color-scheme: dark)");

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
    document.dispatchEvent(new Event("autotune:theme"));
  }

  try {
    const stored = localStorage.getItem("autotune-theme");
    if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
  } catch { /* a page from a file may have no storage */ }
  themeButton.hidden = false;
  themeButton.addEventListener("click", toggleTheme);
  darkScheme.addEventListener("change", labelThemeButton);
  labelThemeButton();

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
