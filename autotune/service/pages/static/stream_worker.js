/* Holds the one connection of a browser to the server's events for all of its tabs: HTTP/1.1 allows
   six connections to a host, and a seventh tab with a stream of its own would freeze. */
import { openStream } from "./stream.js";

const ports = new Set();
let stream = null, state = "connecting";

function tell(message) {
  for (const port of ports) port.postMessage(message);
}

addEventListener("connect", (connection) => {
  const port = connection.ports[0];
  port.onmessage = ({ data }) => {
    if (data.leave) { ports.delete(port); return; }
    if (data.retry) { stream?.retry(); return; }
    ports.add(port);
    if (stream === null) {
      stream = openStream(data.last, {
        heard: (event) => tell({ event }),
        changed: (now) => { state = now; tell({ state }); },
      });
    } else {
      port.postMessage({ state, last: stream.lastId() });
    }
  };
});
