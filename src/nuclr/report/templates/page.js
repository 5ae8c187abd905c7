(() => {
  "use strict";
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector, root = document) => root.querySelector(selector);

  // A click on a legend entry hides or shows its curve in the same figure.
  for (const key of all("button.key")) {
    key.addEventListener("click", () => {
      const shown = key.getAttribute("aria-pressed") !== "true";
      key.setAttribute("aria-pressed", String(shown));
      const scope = key.closest("[data-scope]");
      for (const curve of all("[data-series]", scope)) {
        if (curve.dataset.series === key.dataset.key) curve.toggleAttribute("hidden", !shown);
      }
    });
  }

  // The pointer or the arrow keys on a chart show the values at one x.
  const short = (v, percent) => {
    if (v === null) return "–";
    const text = percent ? (100 * v).toFixed(1) + " %" : String(Number(v.toPrecision(4)));
    return text.replace("-", "−");
  };
  for (const figure of all(".chart")) {
    const source = one(".points", figure);
    if (!source) continue;
    const data = JSON.parse(source.textContent);
    const svg = one("svg", figure), cursor = one(".cursor", svg), readout = one(".readout", figure);
    const [left, right] = data.box, inner = (v) => (data.log ? Math.log10(v) : v);
    const [low, high] = data.x.map(inner);
    const pixel = (x) => left + ((inner(x) - low) / (high - low)) * (right - left);
    const stops = [...new Set(data.series.flatMap((s) => s.x))].sort((a, b) => a - b);
    let at = -1;
    const read = (k) => {
      at = Math.max(0, Math.min(stops.length - 1, k));
      const x = stops[at], px = pixel(x), values = [];
      for (const s of data.series) {
        const curve = all("[data-series]", svg).find((c) => c.dataset.series === s.name);
        if (curve && curve.hasAttribute("hidden")) continue;
        let best = 0;
        for (let i = 1; i < s.x.length; i++) if (Math.abs(s.x[i] - x) < Math.abs(s.x[best] - x)) best = i;
        values.push(`${s.name} ${short(s.y[best], data.percent)}`);
      }
      cursor.setAttribute("x1", px);
      cursor.setAttribute("x2", px);
      cursor.removeAttribute("hidden");
      readout.textContent = `${data.label} ${short(x)}: ${values.join(" · ")}`;
    };
    const clear = () => { cursor.setAttribute("hidden", ""); readout.textContent = ""; at = -1; };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const px = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      let best = 0;
      stops.forEach((x, i) => { if (Math.abs(pixel(x) - px) < Math.abs(pixel(stops[best]) - px)) best = i; });
      read(best);
    });
    svg.addEventListener("pointerleave", clear);
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("blur", clear);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) { read(at < 0 ? (step > 0 ? 0 : stops.length - 1) : at + step); event.preventDefault(); }
    });
  }
})();
