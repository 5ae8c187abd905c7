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

  // The search box: a query on the left, what it finds on the right; a click on an item lists the queries that find it.
  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    if (text) element.textContent = text;
    if (name) element.className = name;
    return element;
  };
  const MOST = 50;
  for (const box of all(".try")) {
    const data = JSON.parse(one(".searches", box).textContent);
    const filter = one("input", box), list = one(".try-queries", box), everything = one(".try-all", box);
    let query = -1, item = -1;

    const picture = (side, at) => {
      const source = data.pictures[side][at];
      if (!source) return null;
      const image = make("img");
      image.src = source;
      image.alt = "";
      return image;
    };
    const fill = (element, side, at) => {
      const image = picture(side, at);
      const text = make("span", data[side][at]);
      text.dir = "auto";
      element.append(...(image ? [image] : []), text);
    };
    const matching = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const found = [];
      data.queries.forEach((text, at) => {
        if (item >= 0 && !data.plain[at].includes(item) && !data.corrected[at].includes(item)) return;
        const lower = text.toLowerCase();
        if (words.every((word) => lower.includes(word))) found.push(at);
      });
      return found;
    };
    const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "y" : "ies"}`;

    const showList = () => {
      const found = matching();
      if (item >= 0) found.sort((a, b) => data.corrected[a].includes(item) - data.corrected[b].includes(item));
      list.replaceChildren();
      for (const at of found.slice(0, MOST)) {
        const button = make("button");
        button.type = "button";
        button.dataset.query = at;
        fill(button, "queries", at);
        if (at === query) button.setAttribute("aria-current", "true");
        if (item >= 0 && !data.corrected[at].includes(item)) button.append(make("em", "no longer finds it"));
        if (item >= 0 && !data.plain[at].includes(item)) button.append(make("em", "finds it now"));
        const row = make("li");
        row.append(button);
        list.append(row);
      }
      const rest = found.length > MOST ? `, the first ${MOST} are listed` : "";
      let status = `${count(found.length, "quer")}${rest}`;
      if (item >= 0) {
        const left = found.filter((at) => !data.corrected[at].includes(item)).length;
        status = `${count(found.length, "quer")} with “${data.items[item].slice(0, 80)}”${rest}: ${left} no longer find it`;
      }
      one(".try-status", box).textContent = status;
      everything.hidden = item < 0;
    };
    const showResults = () => {
      const asked = one(".try-asked", box);
      asked.replaceChildren();
      if (query < 0) return;
      asked.append(make("p", "query", "tag"));
      const text = make("p");
      fill(text, "queries", query);
      asked.append(text);
      for (const [name, other, word] of [["plain", "corrected", "gone"], ["corrected", "plain", "new"]]) {
        const results = one(`.try-${name}`, box);
        results.replaceChildren();
        for (const at of data[name][query]) {
          const button = make("button");
          button.type = "button";
          button.dataset.item = at;
          fill(button, "items", at);
          const [before, after] = data.counts[at];
          const facts = make("small");
          if (data.right[query].includes(at)) facts.append(make("b", "✓ right ", "ok"));
          const changed = !data[other][query].includes(at);
          if (changed) facts.append(make("b", `${word} `, word));
          facts.append(`found by ${before.toLocaleString("en")} → ${after.toLocaleString("en")}`);
          button.append(facts);
          button.title = "Show the queries that find this item";
          const row = make("li", "", changed ? word : "");
          if (at === item) row.classList.add("chosen");
          row.append(button);
          results.append(row);
        }
      }
    };
    const pick = (at) => {
      query = at;
      for (const button of all("button", list)) {
        button.toggleAttribute("aria-current", Number(button.dataset.query) === at);
        if (Number(button.dataset.query) === at) button.setAttribute("aria-current", "true");
      }
      showResults();
    };
    const about = (at) => {
      item = at;
      filter.value = "";
      showList();
      showResults();
    };
    filter.addEventListener("input", () => {
      showList();
      const first = matching()[0];
      if (first !== undefined) pick(first);
    });
    list.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) pick(Number(button.dataset.query));
    });
    one(".try-results", box).addEventListener("click", (event) => {
      const button = event.target.closest("button[data-item]");
      if (button) about(Number(button.dataset.item));
    });
    everything.addEventListener("click", () => { about(-1); filter.focus(); });
    // The arrow keys move between the box and the queries; a query is shown when it has the focus.
    one(".try-side", box).addEventListener("keydown", (event) => {
      const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!step) return;
      const stops = [filter, ...all("button", list)];
      const next = stops[stops.indexOf(document.activeElement) + step];
      if (next) next.focus();
      if (next && next !== filter) pick(Number(next.dataset.query));
      event.preventDefault();
    });
    showList();
    if (data.queries.length) pick(0);
  }
})();
