/* Figures on paper. Before a page is printed each figure is drawn once more, next to the one of the
   screen, in light colours and at the width of a page; afterwards that drawing is removed.

   A browser prints what was drawn when the listeners of `beforeprint` return. All of this is
   therefore synchronous: what Plotly does later, in a promise, is not printed. */
"use strict";

const paper = (function () {
  const WIDTH = 680; // pixels: A4 and Letter in portrait, with margins of up to 15 mm
  const HEIGHT = 700; // what a page has room for, below a heading and above a caption
  const USUAL_HEIGHT = 430; // of a figure that sets no height
  const LEAST_ZOOM = 0.5;
  const settings = { staticPlot: true, responsive: false, displayModeBar: false };

  /* Draw `figure`, of which `div` is the drawing on the screen. `figure` may be changed. */
  function draw(div, figure, template) {
    const meta = figure.layout.meta || {};
    const width = Math.max(WIDTH, meta.least_width || 0);
    const height = figure.layout.height || USUAL_HEIGHT;
    const zoom = Math.max(LEAST_ZOOM, Math.min(1, WIDTH / width, HEIGHT / height));
    // Marks that a graphics card draws are no part of a printed page.
    for (const trace of figure.data) if (trace.type === "scattergl") trace.type = "scatter";
    const copy = document.createElement("div");
    copy.className = "on-paper";
    copy.style.zoom = zoom;
    div.after(copy);
    const size = { width: Math.floor(WIDTH / zoom), height };
    Plotly.newPlot(copy, figure.data, { ...figure.layout, ...size, template }, settings);
    copyScenes(div, copy);
    return copy;
  }

  /* What a graphics card draws in three dimensions is printed as a picture of it, from where the
     reader looks at the screen's. */
  function copyScenes(div, copy) {
    const scene = copy._fullLayout && copy._fullLayout.scene && copy._fullLayout.scene._scene;
    const place = copy.querySelector(".gl-container");
    if (!scene || !scene.glplot || !place) return;
    const shown = div._fullLayout.scene._scene;
    if (shown) scene.setViewport({ camera: shown.getCamera(), aspectratio: shown.glplot.getAspectratio() });
    const from = scene.glplot.canvas, picture = document.createElement("canvas");
    scene.glplot.redraw(); // a drawing can be read only in the task that drew it
    picture.width = from.width;
    picture.height = from.height;
    picture.style.cssText = "position:absolute; left:0; bottom:0; width:100%; object-fit:contain";
    picture.getContext("2d").drawImage(from, 0, 0);
    place.append(picture);
  }

  function clear() {
    for (const copy of document.querySelectorAll(".on-paper")) {
      Plotly.purge(copy);
      copy.remove();
    }
  }

  /* Open all details, and return a function that closes those again that were closed. */
  function openDetails() {
    const closed = [...document.querySelectorAll("details:not([open])")];
    for (const one of closed) one.open = true;
    return () => { for (const one of closed) one.open = false; };
  }

  /* Call `prepare` before the page is printed, and afterwards what it returned. */
  function whenPrinted(prepare) {
    let undo = null;
    addEventListener("beforeprint", () => { undo = undo || prepare(); });
    addEventListener("afterprint", () => {
      if (undo) undo();
      undo = null;
    });
  }

  whenPrinted(openDetails);

  return { draw, clear, whenPrinted };
})();
