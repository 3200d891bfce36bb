/* One connection to the server's events. It reopens by itself and goes on after the last event. */

const KINDS = [
  "search", "opened", "trial_began", "step", "trial_ended", "front", "confirming", "notice", "study", "reset",
];
/* What every address of the server begins with: this file is in its static/VERSION/. */
export const ROOT = new URL("../..", import.meta.url).pathname.replace(/\/$/, "");
const SHORTEST_WAIT = 1000, LONGEST_WAIT = 30000; // milliseconds

/* Calls heard({kind, id, data}) for each event and changed("live" or "lost"). */
export function openStream(last, { heard, changed }) {
  let lastId = last, source = null, timer = 0, wait = SHORTEST_WAIT;

  function open() {
    const query = lastId ? `?last_event_id=${encodeURIComponent(lastId)}` : "";
    source = new EventSource(`${ROOT}/api/v1/events${query}`);
    source.onopen = () => { wait = SHORTEST_WAIT; changed("live"); };
    source.onerror = () => {
      // The browser would repeat the first address: it is opened again with the last event instead.
      source.close();
      changed("lost");
      clearTimeout(timer);
      timer = setTimeout(open, wait);
      wait = Math.min(2 * wait, LONGEST_WAIT);
    };
    for (const kind of KINDS) {
      source.addEventListener(kind, (event) => {
        if (event.lastEventId) lastId = event.lastEventId;
        heard({ kind, id: event.lastEventId, data: JSON.parse(event.data) });
      });
    }
  }

  open();
  return { lastId: () => lastId, retry: () => { if (source.readyState === EventSource.CLOSED) { clearTimeout(timer); open(); } } };
}
