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
        const bounds = s.low ? [s.low[best], s.high[best]] : [s.y[best]];
        values.push(`${s.name} ${bounds.map((v) => short(v, data.percent)).join(" to ")}`);
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

  // The gallery: filter, sort, search, and download the shown cards as CSV.
  const source = one("#g-data");
  if (source) {
    const data = JSON.parse(source.textContent), list = one(".gallery .cards");
    const cards = all(".card", list), side = one("#g-side"), group = one("#g-group"), sort = one("#g-sort");
    const words = one("#g-text"), count = one("#g-count"), empty = one(".empty");
    let shown = [];
    const order = (a, b) => {
      const key = sort.value.slice(1), sign = sort.value.startsWith("-") ? -1 : 1;
      const [x, y] = [data[a][key], data[b][key]];
      if (x === y || (x == null && y == null)) return a - b;
      if (x == null || y == null) return x == null ? 1 : -1;
      return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
    };
    const unsearched = ["side", "group", "popularity", "rank", "of", "copies", "zeta", "zeta_rank", "truth", "truth_rank"];
    const texts = data.map((d) => Object.entries(d).map(([k, v]) => (unsearched.includes(k) ? "" : v ?? "")).join(" ").toLowerCase());
    const update = () => {
      const terms = words.value.toLowerCase().split(/\s+/).filter(Boolean);
      const fits = (d, i) => (!side.value || d.side === side.value) && (!group.value || d.group.split(" ").includes(group.value))
        && terms.every((w) => texts[i].includes(w));
      shown = data.map((_, i) => i).filter((i) => fits(data[i], i)).sort(order);
      const visible = new Set(shown);
      cards.forEach((card, i) => card.toggleAttribute("hidden", !visible.has(i)));
      list.append(...shown.map((i) => cards[i]));
      count.textContent = `${shown.length} of ${data.length} samples shown`;
      empty.toggleAttribute("hidden", shown.length > 0);
    };
    // A text that starts like a formula gets an apostrophe in front, as in popularity.csv.
    const safe = (v) => (typeof v === "string" && /^[=+\-@\t\r]/.test(v) && Number.isNaN(Number(v)) ? `'${v}` : String(v));
    const cell = (v) => (v == null ? "" : /[",\r\n]/.test(safe(v)) ? `"${safe(v).replaceAll('"', '""')}"` : safe(v));
    one("#g-csv").addEventListener("click", () => {
      const columns = Object.keys(data[0] ?? {});
      const lines = [columns, ...shown.map((i) => columns.map((c) => data[i][c]))].map((row) => row.map(cell).join(","));
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv;charset=utf-8" }));
      link.download = "popularity.csv";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
    for (const control of [side, group, sort]) control.addEventListener("change", update);
    words.addEventListener("input", update);
    one(".controls").addEventListener("submit", (event) => event.preventDefault());
    update();
  }
})();
