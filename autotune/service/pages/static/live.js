/* Keeps a page up to date: hears the server's events, and asks for the parts of the page that they
   concern. Numbers of a running trial are changed in place. A part that is the same is left alone,
   and so is one in which text is selected or a field is filled in. */
import { ROOT, openStream } from "./stream.js";

const SHORTEST_PAUSE = 1000; // milliseconds between two refreshes of a part
const script = document.querySelector("script[data-worker]");
const line = document.getElementById("stream");
const lastOfPage = document.querySelector("meta[name=last-event]").content;

// -- the state of the connection ---------------------------------------------------------------------

let lostTimer = 0;

function showState(state) {
  clearTimeout(lostTimer);
  if (state === "live") setState("live", "Live");
  // A connection that is back within a moment is no news.
  else if (state === "lost") lostTimer = setTimeout(() => setState("lost", "Connection lost, trying again"), 1500);
}

function setState(state, text) {
  if (line.dataset.state === state) return;
  line.dataset.state = state;
  line.textContent = text;
}

// -- one stream for all tabs -------------------------------------------------------------------------

const hears = { heard, changed: showState };

function connectByWorker() {
  const worker = new SharedWorker(script.dataset.worker, { type: "module", name: "autotune" });
  worker.port.onmessage = ({ data }) => {
    if (data.state) showState(data.state);
    if (data.event) heard(data.event);
    // The tab is new and the stream is not: what it has told the others since is caught up with.
    if (data.last && data.last !== lastOfPage) refreshAll();
  };
  worker.port.postMessage({ last: lastOfPage });
  addEventListener("pagehide", () => worker.port.postMessage({ leave: true }));
  addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
  addEventListener("online", () => worker.port.postMessage({ retry: true }));
  worker.onerror = connectByOneTab;
}

/* Without shared workers, the tab that holds a lock has the stream and tells the others. */
function connectByOneTab() {
  if (!("BroadcastChannel" in window) || !navigator.locks) {
    openStream(lastOfPage, hears);
    return;
  }
  const channel = new BroadcastChannel(`autotune${ROOT}`);
  channel.onmessage = ({ data }) => {
    if (data.state) showState(data.state);
    if (data.event) heard(data.event);
    if (data.newcomer && stream) channel.postMessage({ state: line.dataset.state });
  };
  channel.postMessage({ newcomer: true });
  let stream = null;
  navigator.locks.request(`autotune-stream${ROOT}`, () => {
    stream = openStream(lastOfPage, {
      heard: (event) => { channel.postMessage({ event }); heard(event); },
      changed: (state) => { channel.postMessage({ state }); showState(state); },
    });
    return new Promise(() => {}); // the lock is held until the tab is closed
  });
}

// -- what an event changes ---------------------------------------------------------------------------

function heard(event) {
  const { kind, data } = event;
  if (kind === "step" || kind === "trial_began") showProgress(kind, data);
  if (kind === "trial_ended" || kind === "search") forgetSteps(data.search);
  if (isOfThisPage(data)) speak(kind, data);
  document.dispatchEvent(new CustomEvent("autotune:event", { detail: event }));
  for (const part of document.querySelectorAll("[data-live]")) {
    if (part.dataset.live.split(" ").includes(kind) && concerns(part, kind, data)) refresh(part);
  }
}

function isOfThisPage(data) {
  const page = document.querySelector("[data-live][data-study], [data-live][data-search-id]");
  return page !== null && concerns(page, "", data);
}

/* Shows characters that nobody can see as escapes: some reorder a line. The server writes the texts
   of its pages in this way, and sends those of events as they are. */
function visible(text) {
  return String(text).replace(/(?![\n\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu,
    (character) => `\\u{${character.codePointAt(0).toString(16)}}`);
}

/* Says in a sentence what has happened, also to who does not see the page. */
function speak(kind, data) {
  const spoken = document.getElementById("spoken");
  if (kind === "notice" && data.message) say(data.on_page || data.message);
  if (kind === "trial_ended") spoken.textContent = `Trial ${data.trial.number} has ended: ${data.trial.outcome.replaceAll("_", " ")}.`;
  if (kind === "search") {
    spoken.textContent = `The search is ${data.state}.`;
  }
}

function concerns(part, kind, data) {
  if (kind === "reset") return true;
  if (part.dataset.study) return part.dataset.study === data.study;
  if (part.dataset.searchId) return part.dataset.searchId === String(data.search);
  return true;
}

const steps = new Map(); // what each place of each search does, to be shown again in a new part

function showProgress(kind, data) {
  const device = data.device || "";
  steps.set(`${data.search} ${device}`, { kind, data });
  for (const place of document.querySelectorAll(`[data-now="${Number(data.search)}"]`)) {
    if (place.dataset.device === device) showAt(place, kind, data);
  }
}

function forgetSteps(search) {
  for (const key of steps.keys()) if (key.startsWith(`${search} `)) steps.delete(key);
}

function showAt(place, kind, data) {
  const [ended, wanted] = data.steps || [0, 0];
  const doing = [data.doing || "starting", wanted ? `step ${ended} of ${wanted}` : ""];
  place.querySelector("[data-doing]").textContent = visible(doing.filter(Boolean).join(", "));
  const bar = place.querySelector("[data-steps]");
  bar.max = wanted || 1;
  bar.value = ended;
  if (kind === "trial_began") place.querySelector("[data-trial]").textContent = visible(`#${data.number} ${data.name || data.label}`);
}

document.addEventListener("htmx:afterSwap", ({ target }) => {
  for (const place of target.querySelectorAll("[data-now]")) {
    const known = steps.get(`${place.dataset.now} ${place.dataset.device}`);
    if (known) showAt(place, known.kind, known.data);
  }
});

// -- parts of the page -------------------------------------------------------------------------------

const parts = new WeakMap();

function stateOf(part) {
  if (!parts.has(part)) parts.set(part, { timer: 0, last: 0, took: 0, text: null, isAsking: false, again: false });
  return parts.get(part);
}

/* Asks for a part soon. One that takes the server long is asked for more seldom. */
function refresh(part) {
  const state = stateOf(part);
  if (state.timer) return;
  if (state.isAsking) { state.again = true; return; }
  const pause = Math.max(SHORTEST_PAUSE, 5 * state.took);
  const wait = Math.max(120, state.last + pause - performance.now());
  state.timer = setTimeout(() => { state.timer = 0; ask(part, state); }, wait);
}

async function ask(part, state) {
  if (!part.isConnected) return;
  if (document.hidden) { state.again = true; return; } // asked for when the tab is looked at again
  if (hasSelection(part) || isFilledIn(part)) { state.timer = setTimeout(() => { state.timer = 0; ask(part, state); }, 1000); return; }
  state.isAsking = true;
  const began = performance.now();
  try {
    await htmx.ajax("GET", part.dataset.part + location.search, { target: part, source: part });
  } catch { /* said by htmx:responseError or htmx:sendError */ }
  state.isAsking = false;
  state.last = performance.now();
  state.took = state.last - began;
  if (state.again) { state.again = false; refresh(part); }
}

function hasSelection(part) {
  const selection = getSelection();
  return !selection.isCollapsed && part.contains(selection.anchorNode);
}

/* Whether one is at a field of the part: what is typed must not be replaced. */
function isFilledIn(part) {
  return part.contains(document.activeElement) && document.activeElement.matches("input, select, textarea");
}

function refreshAll() { document.querySelectorAll("[data-live]").forEach(refresh); }

document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  for (const part of document.querySelectorAll("[data-live]")) {
    const state = stateOf(part);
    if (state.again && !state.isAsking) { state.again = false; refresh(part); }
  }
});

for (const part of document.querySelectorAll("[data-every]")) {
  setInterval(() => { if (!document.hidden) refresh(part); }, 1000 * Number(part.dataset.every));
}

document.addEventListener("htmx:beforeSwap", (event) => {
  const part = event.detail.target;
  if (!part.matches?.("[data-live]")) return;
  const state = stateOf(part);
  const text = event.detail.serverResponse;
  if (event.detail.xhr.status === 200 && text === state.text) event.detail.shouldSwap = false;
  state.text = text;
});

/* A browser that does not keep what one reads in place, when something above it grows, is helped. */
const anchors = CSS.supports("overflow-anchor", "auto");
let above = null;

document.addEventListener("htmx:beforeSwap", ({ detail: { target } }) => {
  const box = target.getBoundingClientRect();
  above = !anchors && box.bottom < 0 ? { target, height: box.height } : null;
});
document.addEventListener("htmx:afterSwap", ({ detail: { target } }) => {
  if (above?.target === target) scrollBy(0, target.getBoundingClientRect().height - above.height);
  above = null;
});

// -- time left ---------------------------------------------------------------------------------------

function duration(seconds) {
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} m ${String(Math.round(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} m`;
}

setInterval(() => {
  if (document.hidden || line.dataset.state === "lost") return;
  for (const place of document.querySelectorAll("[data-seconds-left]")) {
    const left = Math.max(0, Number(place.dataset.secondsLeft) - 5);
    place.dataset.secondsLeft = left;
    place.textContent = left > 0 ? `about ${duration(left)} left` : "nearly done";
  }
}, 5000);

// -- messages ----------------------------------------------------------------------------------------

let sayTimer = 0;

export function say(text) {
  const place = document.getElementById("said");
  place.textContent = visible(text);
  clearTimeout(sayTimer);
  sayTimer = setTimeout(() => { place.textContent = ""; }, 5000);
}

document.addEventListener("htmx:responseError", (event) => {
  const status = event.detail.xhr.status;
  say(status === 401 ? "You are signed out: load the page again." : `The server could not answer (${status}).`);
});
document.addEventListener("htmx:sendError", () => say("The server cannot be reached."));

if ("SharedWorker" in window) connectByWorker();
else connectByOneTab();
