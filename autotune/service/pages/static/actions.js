/* What a reader does: cancel, continue, change a priority, rename, delete, copy; and the form of a new
   search. Everything that is written goes to the interface, whose sentences are shown as text. */
import { say } from "./live.js";
import { ROOT } from "./stream.js";

const byId = (id) => document.getElementById(id);
const dialog = byId("dialog");

async function send(method, path, body) {
  const answer = await fetch(path, {
    method,
    headers: { "Content-Type": "application/json", Accept: "application/json", "X-Requested-With": "page" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const text = await answer.text();
  let found = {};
  try { found = text ? JSON.parse(text) : {}; } catch { found = { detail: text }; }
  return { ok: answer.ok, status: answer.status, found };
}

function sentence({ detail, hint }) {
  const whole = (text) => (text ? text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".") : "");
  return [whole(detail || "The server did not do it"), whole(hint)].filter(Boolean).join(" ");
}

// -- the dialog --------------------------------------------------------------------------------------

let onGo = null;

function ask({ title, texts = [], fields = [], go, danger = false, done }) {
  byId("dialog-title").textContent = title;
  byId("dialog-text").replaceChildren(...texts.map((text) => {
    const paragraph = document.createElement("p");
    paragraph.textContent = text;
    return paragraph;
  }));
  byId("dialog-fields").replaceChildren(...fields.map(({ name, label, value = "", type = "text" }) => {
    const element = document.createElement("label");
    const input = document.createElement("input");
    element.textContent = label;
    Object.assign(input, { name, value, type, autocomplete: "off" });
    if (type === "number") input.step = "1";
    element.append(input);
    return element;
  }));
  byId("dialog-error").textContent = "";
  const button = byId("dialog-go");
  button.hidden = !go;
  button.textContent = go || "";
  button.className = danger ? "danger" : "main-button";
  onGo = done;
  if (!dialog.open) dialog.showModal();
  (dialog.querySelector("#dialog-fields input") || byId("dialog-close")).focus();
}

byId("dialog-close").addEventListener("click", () => dialog.close());
dialog.querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const values = Object.fromEntries(new FormData(event.target));
  byId("dialog-go").disabled = true;
  try {
    const problem = await onGo(values);
    if (problem) byId("dialog-error").textContent = problem;
  } catch {
    byId("dialog-error").textContent = "The server cannot be reached.";
  }
  byId("dialog-go").disabled = false;
});

async function finish(request, text) {
  const answer = await request;
  if (!answer.ok) return sentence(answer.found);
  dialog.close();
  say(text);
  return "";
}

// -- actions -----------------------------------------------------------------------------------------

const actions = {
  cancel({ search, title }) {
    ask({
      title: `Cancel ${title}?`,
      texts: ["What was measured so far is kept. It can be continued later."],
      go: "Cancel the search", danger: true,
      done: () => finish(send("POST", `${ROOT}/api/v1/searches/${search}/cancel`), `${title} is being cancelled.`),
    });
  },
  priority({ search, title, value }) {
    ask({
      title: `Priority of ${title}`,
      texts: ["From -100 to 100. The search with the highest priority begins first."],
      fields: [{ name: "priority", label: "Priority", value, type: "number" }],
      go: "Change",
      done: ({ priority }) => finish(
        send("PATCH", `${ROOT}/api/v1/searches/${search}`, { priority: Number(priority) }), "The priority is changed."),
    });
  },
  continue({ search, title, owner }) {
    const own = { name: "name", label: "Name of your study", value: "" };
    ask({
      title: `Continue ${title}`,
      texts: [owner
        ? `${title} belongs to ${owner}. A study of your own takes over what was measured.`
        : "More trials are tried in the same study."],
      fields: [
        ...(owner ? [own] : []),
        { name: "trials", label: "More trials (empty: as many as were wanted)", type: "number" },
        { name: "time_budget", label: "Time, such as 30m (may be left empty)" },
      ],
      go: "Continue",
      done: ({ name, trials, time_budget: time }) => {
        const body = {};
        if (name) body.name = name;
        if (trials) body.trials = Number(trials);
        if (time) body.time_budget = time;
        return finish(send("POST", `${ROOT}/api/v1/searches/${search}/continue`, body), `${name || title} is in the queue.`);
      },
    });
  },
  rename({ study }) {
    ask({
      title: `Rename ${study}`,
      fields: [{ name: "name", label: "New name", value: study }],
      go: "Rename",
      done: async ({ name }) => {
        const answer = await send("PATCH", `${ROOT}/api/v1/studies/${encodeURIComponent(study)}`, { name });
        if (!answer.ok) return sentence(answer.found);
        location.assign(`${ROOT}/studies/${encodeURIComponent(name)}`);
        return "";
      },
    });
  },
  /* Asked twice: the first answer says what would be gone, and the name has to be typed. */
  async delete({ study }) {
    const path = `${ROOT}/api/v1/studies/${encodeURIComponent(study)}`;
    const first = await send("DELETE", path);
    const code = first.found.confirm;
    if (!code) {
      ask({ title: `${study} cannot be deleted now`, texts: [sentence(first.found)] });
      return;
    }
    const gone = Object.entries(first.found.will_be_deleted || {})
      .filter(([, what]) => typeof what !== "object")
      .map(([name, what]) => `${name.replaceAll("_", " ")}: ${what}`);
    ask({
      title: `Delete ${study}?`,
      texts: ["This will be gone:", ...gone, "It is exported to a file on the server first, from which it can be imported again."],
      fields: [{ name: "typed", label: "Type the name of the study" }],
      go: "Delete it", danger: true,
      done: async ({ typed }) => {
        if (typed !== study) return `That is not ${study}.`;
        const answer = await send("DELETE", `${path}?confirm=${encodeURIComponent(code)}`);
        if (!answer.ok) return sentence(answer.found);
        ask({
          title: `${study} is deleted`,
          texts: [`Its export is in ${answer.found.exported_to} on ${answer.found.machine}.`],
          go: "Go to the list of studies",
          done: () => { location.assign(`${ROOT}/`); },
        });
        return "";
      },
    });
  },
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-action]");
  if (button) {
    button.closest("details.menu")?.removeAttribute("open");
    actions[button.dataset.action](button.dataset);
    return;
  }
  const copier = event.target.closest("[data-copy]");
  if (copier) copy(copier.closest(".file").querySelector("pre").textContent, copier.dataset.copy);
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    if (!menu.contains(event.target)) menu.removeAttribute("open");
  }
});
document.addEventListener("keydown", (event) => {
  const menu = event.key === "Escape" && document.querySelector("details.menu[open]");
  if (!menu) return;
  menu.removeAttribute("open");
  menu.querySelector("summary").focus();
});

// -- copying -----------------------------------------------------------------------------------------

async function copy(text, what) {
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch { // a page that is not on https or localhost
    const field = document.createElement("textarea");
    const focused = document.activeElement;
    field.value = text;
    field.className = "hidden";
    document.body.append(field);
    field.select();
    done = document.execCommand("copy");
    field.remove();
    focused?.focus();
  }
  say(done ? `Copied: ${what}` : "This browser does not let a page copy: select the text instead.");
}

// -- logs are shown from their end -------------------------------------------------------------------

for (const log of document.querySelectorAll("[data-log]")) log.scrollTop = log.scrollHeight;

// -- the trainer that is shown -----------------------------------------------------------------------

document.addEventListener("htmx:beforeRequest", ({ target }) => {
  if (!target.matches("[data-tab]")) return;
  for (const tab of document.querySelectorAll("[data-tab]")) tab.removeAttribute("aria-current");
  target.setAttribute("aria-current", "true");
});

// -- the form of a new search ------------------------------------------------------------------------

const form = byId("new-search");
if (form) {
  let timer = 0;
  const change = () => {
    clearTimeout(timer);
    byId("plan").classList.add("busy");
    timer = setTimeout(() => document.body.dispatchEvent(new Event("plan")), 600);
  };
  form.addEventListener("input", change);
  form.addEventListener("change", change);
  document.addEventListener("htmx:afterRequest", ({ target }) => { if (target.id === "plan") target.classList.remove("busy"); });
  form.addEventListener("submit", () => { form.querySelector("[type=submit]").disabled = true; });
  addEventListener("pageshow", () => { form.querySelector("[type=submit]").disabled = form.dataset.readOnly === "true"; });
}
