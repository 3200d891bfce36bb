/* Every text that stands out from what is behind it by less than 4.5 to 1. */
() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  function rgb(colour) {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  }
  function luminance(colour) {
    const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = colour.slice(0, 3).map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  }
  function behind(element) {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255];
  }
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const isText = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!isText || element.closest("svg, script, .drawing, :disabled") || !element.checkVisibility()) continue;
    const [a, b] = [luminance(rgb(getComputedStyle(element).color)), luminance(behind(element))].sort((x, y) => y - x);
    const contrast = (a + .05) / (b + .05);
    if (contrast < 4.5) faint.push([element.tagName, element.className, contrast.toFixed(2)].join(" "));
  }
  return faint;
}
