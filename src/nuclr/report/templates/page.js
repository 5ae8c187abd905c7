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

  // The search box: queries and items on the left, what a query finds on the right. A click on an item lists the queries
  // that find it, first those that no longer do, with what they find instead.
  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    if (text) element.textContent = text;
    if (name) element.className = name;
    return element;
  };
  const MOST = 50;
  for (const box of all(".try")) {
    const data = JSON.parse(one(".searches", box).textContent);
    const filter = one("input", box), kind = one("select", box), everything = one(".try-all", box);
    const lists = { queries: one(".try-queries", box), items: one(".try-items", box) };
    const byCount = data.items.map((_, at) => at).sort((a, b) => data.counts[b][0] - data.counts[a][0]);
    let query = -1, item = -1;

    const count = (number) => `${number.toLocaleString("en")} ${number === 1 ? "query" : "queries"}`;
    const button = (side, at, className) => {
      const element = make("button"), row = make("li", "", className), text = make("span", data[side][at]);
      element.type = "button";
      element.dataset[side] = at;
      if (data.pictures[side][at]) {
        const image = make("img");
        image.src = data.pictures[side][at];
        image.alt = "";
        element.append(image);
      }
      text.dir = "auto";
      element.append(text);
      row.append(element);
      return [row, element];
    };
    const itemButton = (at, words, className) => {
      const [row, element] = button("items", at, className), facts = make("small");
      const [before, after] = data.counts[at];
      for (const [text, name] of words) facts.append(make("b", `${text} `, name));
      facts.append(`found by ${before.toLocaleString("en")} → ${count(after)}`);
      element.append(facts);
      if (at === item) element.setAttribute("aria-current", "true");
      return row;
    };
    const first = (list, at) => data.right[at].includes(data[list][at][0]);
    const wanted = (at) => {
      if (item >= 0 && !data.plain[at].includes(item) && !data.corrected[at].includes(item)) return false;
      return !kind?.value || (first("plain", at) !== first("corrected", at) && first("plain", at) === (kind.value === "lost"));
    };

    const showLists = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const matches = (text) => words.every((word) => text.toLowerCase().includes(word));
      const found = data.queries.map((_, at) => at).filter((at) => wanted(at) && matches(data.queries[at]));
      const stays = (at) => data.corrected[at].includes(item);
      if (item >= 0) found.sort((a, b) => stays(a) - stays(b));
      lists.queries.replaceChildren(...found.slice(0, MOST).map((at) => {
        const [row, element] = button("queries", at);
        if (item >= 0 && !stays(at)) {
          const instead = data.corrected[at].find((other) => !data.plain[at].includes(other));
          element.append(make("em", `instead: ${data.items[instead]}`));
        } else if (item >= 0 && !data.plain[at].includes(item)) element.append(make("em", "finds it now"));
        return row;
      }));
      const items = byCount.filter((at) => matches(data.items[at])).slice(0, MOST);
      lists.items.replaceChildren(...items.map((at) => itemButton(at, [])));
      let status = count(found.length);
      if (kind?.value) status += ` (${kind.selectedOptions[0].textContent})`;
      if (item >= 0) {
        const gone = found.filter((at) => !stays(at)).length;
        status += ` with “${data.items[item].slice(0, 80)}”: ${gone.toLocaleString("en")} no longer find it`;
      }
      one(".try-status", box).textContent = status + (found.length > MOST ? `; the first ${MOST} are listed` : "");
      everything.hidden = item < 0;
      return found;
    };
    const pick = (at) => {
      query = at;
      for (const element of all("button", lists.queries)) {
        if (Number(element.dataset.queries) === at) element.setAttribute("aria-current", "true");
        else element.removeAttribute("aria-current");
      }
      const asked = make("p", data.queries[at]);
      asked.dir = "auto";
      one(".try-asked", box).replaceChildren(make("p", "query", "tag"), asked);
      for (const [name, other, word] of [["plain", "corrected", "gone"], ["corrected", "plain", "new"]]) {
        one(`.try-${name}`, box).replaceChildren(...data[name][at].map((found) => {
          const changed = !data[other][at].includes(found);
          const right = data.right[at].includes(found);
          return itemButton(found, [...(right ? [["✓ right", "ok"]] : []), ...(changed ? [[word, word]] : [])], changed ? word : "");
        }));
      }
    };
    const update = () => {
      const found = showLists();
      if (found.length) pick(found.includes(query) && item >= 0 ? query : found[0]);
    };
    const about = (at) => {
      item = at;
      filter.value = "";
      if (kind) kind.value = "";
      update();
      (at < 0 ? filter : everything).focus();
    };
    filter.addEventListener("input", update);
    kind?.addEventListener("change", update);
    everything.addEventListener("click", () => about(-1));
    box.addEventListener("click", (event) => {
      const { queries, items } = event.target.closest("li button")?.dataset ?? {};
      if (queries) pick(Number(queries));
      if (items) about(Number(items));
    });
    // The arrow keys move between the box, the queries and the items; a query is shown when it has the focus.
    one(".try-side", box).addEventListener("keydown", (event) => {
      const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!step || event.target === kind) return;
      const stops = [filter, ...all("li button", one(".try-side", box))];
      const next = stops[stops.indexOf(document.activeElement) + step];
      next?.focus();
      if (next?.dataset.queries) pick(Number(next.dataset.queries));
      event.preventDefault();
    });
    update();
  }
})();
