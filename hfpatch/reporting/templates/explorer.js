"use strict";
(() => {
  const root = document.querySelector(".explorer");
  const data = JSON.parse(document.querySelector(".explorer-data").textContent);
  const form = root.querySelector("form");
  const GREYED = new Set(["undecided", "not tested", "no verdict", "diverged"]);
  const MOST_PANELS = 12;
  const MOST_ROWS = 200;
  const MOST_NAMES = 14; // of more points, only the better ones are named
  const make = (tag, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };
  const draw = (tag, attributes, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const several = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

  const keys = ["run", "axis", "method", "gain", "low", "high", "text", "verdict", "parameters", "seconds", "memory", "seeds"];
  const entries = data.rows.map((row) => {
    const entry = Object.fromEntries(keys.map((key, index) => [key, row[index]]));
    entry.axis = { ...data.axes[entry.axis], index: entry.axis };
    entry.run = data.runs[entry.run];
    entry.verdict = data.verdicts[entry.verdict];
    entry.searched = [entry.method, entry.run.label, entry.axis.model, entry.axis.task, entry.axis.metric, entry.verdict].join(" ").toLowerCase();
    return entry;
  });

  // Numbers as a reader wants them.
  const MINUS = "−";
  const figures = (value, digits = 3) => {
    const text = Math.abs(value) >= 1e6 || (value && Math.abs(value) < 1e-4) ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
    return text.replace("-", MINUS);
  };
  const scaled = (value, units) => {
    const [size, unit] = units.find(([limit]) => value >= limit) || units[units.length - 1];
    return `${figures(value / size)}${unit}`;
  };
  const UNITS = {
    parameters: [[1e9, "B"], [1e6, "M"], [1e3, "k"], [1, ""]],
    seconds: [[86400, " d"], [3600, " h"], [60, " min"], [1, " s"]],
    memory: [[2 ** 30, " GiB"], [2 ** 20, " MiB"]],
  };
  const words = Object.fromEntries(Object.entries(UNITS).map(([cost, units]) => [cost, (value) => scaled(value, units)]));
  const whole = (value) => value.toLocaleString("en");
  const titles = { parameters: (axis) => axis.size, seconds: () => "training time", memory: () => "peak memory in training" };

  // Filters.
  const options = (name, values) => values.forEach((value) => form.elements[name].append(new Option(value, value)));
  const unique = (values) => [...new Set(values)];
  options("model", unique(entries.map((entry) => entry.axis.model)));
  options("task", unique(entries.map((entry) => entry.axis.task)));
  options("metric", unique(entries.map((entry) => entry.axis.metric)).sort());
  options("method", unique(entries.map((entry) => entry.method)).sort());
  options("verdict", data.verdicts.filter((verdict) => entries.some((entry) => entry.verdict === verdict)));
  options("run", data.runs.map((run) => run.label));
  const fields = {
    model: (entry) => entry.axis.model, task: (entry) => entry.axis.task, method: (entry) => entry.method,
    verdict: (entry) => entry.verdict, run: (entry) => entry.run.label,
  };
  const chosen = () => {
    const given = Object.fromEntries(new FormData(form));
    const sought = given.words.toLowerCase().split(/\s+/).filter(Boolean);
    return entries.filter((entry) =>
      Object.entries(fields).every(([name, value]) => !given[name] || value(entry) === given[name])
      && (!given.metric || (given.metric === "primary" ? entry.axis.primary : entry.axis.metric === given.metric))
      && sought.every((word) => entry.searched.includes(word)));
  };

  // A panel: one axis and, for time and memory, one machine.
  const byPanel = (shown, cost) => {
    const panels = new Map();
    for (const entry of shown) {
      const machine = cost === "parameters" ? null : entry.run.machine;
      const key = `${entry.axis.index} ${machine}`;
      if (!panels.has(key)) panels.set(key, { axis: entry.axis, machine, entries: [] });
      panels.get(key).entries.push(entry);
    }
    return [...panels.values()];
  };
  const isBetter = (entry) => entry.verdict === "better";
  // What nothing else beats at the same or a lower cost, by cost; of equals the first.
  const front = (points, cost) => {
    const best = [];
    for (const entry of [...points].sort((a, b) => a[cost] - b[cost] || b.gain - a.gain)) {
      if (entry.gain > (best.at(-1)?.gain ?? 0)) best.push(entry);
    }
    return best;
  };
  // The budgets of one method in one run, lora@9k and lora@80k, by cost: a line in the figure.
  const byFamily = (points, cost) => {
    const families = new Map();
    for (const entry of [...points].sort((a, b) => a[cost] - b[cost])) {
      const [family, budget] = entry.method.split("@");
      const key = `${family} ${entry.run.label}`;
      if (budget) families.set(key, [...(families.get(key) || []), entry]);
    }
    return [...families.values()];
  };
  const steps = (low, high, most) => {
    const raw = (high - low) / most;
    const size = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * size).find((multiple) => multiple >= raw);
    const ticks = [];
    for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + 1e-9 * step; value += step) ticks.push(Math.abs(value) < 1e-9 * step ? 0 : value);
    return ticks;
  };
  const powers = (low, high) => {
    const ticks = [];
    for (let value = 10 ** Math.floor(Math.log10(low)); value <= high * 1.0001; value *= 10) if (value >= low * 0.9999) ticks.push(value);
    return ticks;
  };
  // Round numbers in the unit that fits the axis.
  const ticksOf = (scale, cost) => {
    if (scale.logarithmic) return powers(scale.from, scale.to).map((value) => [value, words[cost](value)]);
    const [size, unit] = UNITS[cost].find(([limit]) => scale.to >= 2 * limit) || UNITS[cost].at(-1);
    return steps(scale.from / size, scale.to / size, 4).filter((value) => value >= 0)
      .map((value) => [value * size, value === 0 ? "0" : cost === "parameters" ? words[cost](value * size) : `${figures(value, 4)}${unit}`]);
  };
  // A size that all gains fit in, but not twice that of most.
  const robust = (sizes) => {
    const sorted = sizes.filter((size) => size > 0 && size < 1e30).sort((a, b) => a - b);
    return sorted.length ? Math.min(sorted[sorted.length - 1], 2.5 * sorted[Math.floor(0.75 * (sorted.length - 1))]) : 1;
  };

  const HEIGHT = 270;
  const MARGIN = { left: 52, right: 14, top: 22, bottom: 42 };
  const scales = (points, cost, width) => {
    const limit = robust(points.map((entry) => Math.max(Math.abs(entry.gain), Math.abs(entry.low ?? 0), Math.abs(entry.high ?? 0))));
    const reach = Math.max(limit, robust(points.map((entry) => Math.abs(entry.gain))));
    const gains = points.flatMap((entry) => [entry.gain, entry.low ?? entry.gain, entry.high ?? entry.gain]);
    const top = Math.min(Math.max(...gains, 0), reach);
    const bottom = Math.max(Math.min(...gains, 0), -reach);
    const space = 0.08 * (top - bottom || 1);
    const [low, high] = [bottom - space, top + space];
    const costs = points.map((entry) => entry[cost]);
    const [least, most] = [Math.min(...costs), Math.max(...costs)];
    const logarithmic = least > 0 && most > 20 * least;
    const near = !logarithmic && least > 0.5 * most; // then the axis need not begin at 0
    const from = logarithmic ? least / 1.6 : near ? least - 0.35 * (most - least || 0.2 * most) : 0;
    const to = logarithmic ? most * 1.6 : near ? most + 0.35 * (most - least || 0.2 * most) : 1.12 * most || 1;
    const across = width - MARGIN.left - MARGIN.right;
    const part = logarithmic ? (value) => Math.log(value / from) / Math.log(to / from) : (value) => (value - from) / (to - from);
    return {
      low, high, from, to, logarithmic,
      x: (value) => MARGIN.left + across * part(value),
      y: (value) => MARGIN.top + (HEIGHT - MARGIN.top - MARGIN.bottom) * (high - Math.min(high, Math.max(low, value))) / (high - low),
    };
  };
  const MARKS = {
    better: (x, y) => draw("circle", { class: "mark", cx: x, cy: y, r: 5 }),
    worse: (x, y) => draw("path", { class: "mark", d: `M${x} ${y - 6}l6 6-6 6-6-6z` }),
    same: (x, y) => draw("rect", { class: "mark", x: x - 4.5, y: y - 4.5, width: 9, height: 9 }),
    undecided: (x, y) => draw("circle", { class: "mark", cx: x, cy: y, r: 4.5 }),
    cross: (x, y) => draw("path", { class: "mark", d: `M${x - 4} ${y - 4}l8 8m0-8l-8 8` }),
    up: (x, y) => draw("path", { class: "mark", d: `M${x - 5} ${y + 4}h10l-5-9z` }),
    down: (x, y) => draw("path", { class: "mark", d: `M${x - 5} ${y - 4}h10l-5 9z` }),
  };
  const described = (entry, cost) => {
    const size = entry[cost] === null ? `${titles[cost](entry.axis)} not known` : `${cost === "parameters" ? whole(entry.parameters) : words[cost](entry[cost])} ${titles[cost](entry.axis)}`;
    const seeds = entry.seeds ? `, ${several(entry.seeds, "seed")}` : "";
    return `${entry.method} (${entry.run.label}): ${entry.text}, ${entry.verdict}; ${size}${seeds}`;
  };
  // Names beside their points, as many as fit: first those on the front, then the better, then all.
  const nameMarks = (svg, points, scale, cost, best, width) => {
    const runs = new Set(points.map((entry) => entry.run));
    const taken = points.map((entry) => ({ x: scale.x(entry[cost]) - 6, y: scale.y(entry.gain) - 6, w: 12, h: 12 }));
    const rank = (entry) => (best.has(entry) ? 0 : isBetter(entry) ? 1 : 2);
    const named = points.length > MOST_NAMES ? points.filter((entry) => rank(entry) < 2) : points;
    for (const entry of [...named].sort((a, b) => rank(a) - rank(b) || b.gain - a.gain)) {
      const name = runs.size > 1 ? `${entry.method} (${entry.run.label})` : entry.method;
      const text = name.length > 34 ? `${name.slice(0, 33)}…` : name;
      const [x, y, w, h] = [scale.x(entry[cost]), scale.y(entry.gain), 7.2 * text.length + 4, 14];
      const tries = [[9, 4], [-9 - w, 4], [-w / 2, -10], [-w / 2, 19], [9, -8], [9, 16], [-9 - w, -8], [-9 - w, 16]];
      for (const [right, down] of tries) {
        const box = { x: x + right, y: y + down - 11, w, h };
        const inside = box.x >= MARGIN.left && box.x + w <= width - 2 && box.y >= MARGIN.top - 8 && box.y + h <= HEIGHT - MARGIN.bottom;
        if (!inside || taken.some((other) => box.x < other.x + other.w && other.x < box.x + w && box.y < other.y + other.h && other.y < box.y + h)) continue;
        taken.push(box);
        svg.append(draw("text", { class: "name", x: box.x, y: y + down, "aria-hidden": "true" }, text));
        break;
      }
    }
  };
  const drawPanel = (panel, cost, width) => {
    const { axis } = panel;
    const figure = make("figure");
    const svg = draw("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "group", "aria-label": `${axis.task}, ${axis.metric}: gain against ${titles[cost](axis)}` });
    const { points, scale } = panel;
    const line = (name, x1, y1, x2, y2) => draw("line", { class: name, x1, y1, x2, y2 });
    const right = width - MARGIN.right;
    for (const value of steps(scale.low, scale.high, 5)) {
      svg.append(line(value === 0 ? "zero" : "grid", MARGIN.left, scale.y(value), right, scale.y(value)));
      svg.append(draw("text", { x: MARGIN.left - 6, y: scale.y(value) + 4, "text-anchor": "end" }, (value > 0 ? "+" : "") + figures(value)));
    }
    for (const [value, label] of ticksOf(scale, cost)) {
      const anchor = scale.x(value) > right - 24 ? "end" : "middle";
      svg.append(line("grid", scale.x(value), MARGIN.top, scale.x(value), HEIGHT - MARGIN.bottom));
      svg.append(draw("text", { x: scale.x(value), y: HEIGHT - MARGIN.bottom + 16, "text-anchor": anchor }, label));
    }
    svg.append(draw("text", { x: 2, y: 12 }, `gain, ${axis.unit}   ↑ better`));
    svg.append(draw("text", { x: right, y: HEIGHT - 6, "text-anchor": "end" }, `${titles[cost](axis)}${scale.logarithmic ? ", logarithmic" : ""}`));
    if (panel.front.length) {
      const path = panel.front.map((entry) => `H${scale.x(entry[cost])}V${scale.y(entry.gain)}`).join("");
      svg.append(draw("path", { class: `front${panel.untested ? " untested" : ""}`, d: `M${MARGIN.left} ${scale.y(0)}${path}H${right}` }));
    }
    for (const [first, ...more] of byFamily(points, cost)) {
      const path = more.map((entry) => `L${scale.x(entry[cost])} ${scale.y(entry.gain)}`).join("");
      svg.append(draw("path", { class: "family", d: `M${scale.x(first[cost])} ${scale.y(first.gain)}${path}` }));
    }
    const detail = make("p", "", "detail");
    detail.append(make("span", "Point at a mark or tap it, or reach it with Tab and the arrow keys.", "muted"));
    const marks = [...points].sort((a, b) => a[cost] - b[cost] || a.gain - b.gain).map((entry, index) => {
      const [x, y] = [scale.x(entry[cost]), scale.y(entry.gain)];
      const outside = entry.gain > scale.high ? "up" : entry.gain < scale.low ? "down" : null;
      const mark = (MARKS[outside || entry.verdict] || MARKS.cross)(x, y);
      const named = { class: `point ${entry.verdict.replaceAll(" ", "-")}`, tabindex: index ? -1 : 0, "aria-label": described(entry, cost) };
      const point = draw(entry.run.href ? "a" : "g", entry.run.href ? { ...named, href: entry.run.href } : { ...named, role: "img" });
      if (entry.low !== null && entry.high !== null) point.append(line("interval", x, scale.y(entry.low), x, scale.y(entry.high)));
      point.append(mark, draw("circle", { class: "halo", cx: x, cy: y, r: 10 }));
      const show = () => { detail.textContent = described(entry, cost) + (entry.run.href ? "" : " (no report to open)"); };
      point.addEventListener("pointerenter", show);
      point.addEventListener("focus", show);
      point.addEventListener("click", (event) => { // the first touch tells, the second opens
        if (event.pointerType === "touch" && detail.described !== entry) event.preventDefault();
        detail.described = entry;
      });
      return point;
    });
    marks.forEach((point, index) => point.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const next = marks[(index + move + marks.length) % marks.length];
      marks.forEach((mark) => mark.setAttribute("tabindex", mark === next ? 0 : -1));
      next.focus();
    }));
    nameMarks(svg, points, scale, cost, new Set(panel.front), width);
    svg.append(...marks.filter((mark) => !mark.classList.contains("better")), ...marks.filter((mark) => mark.classList.contains("better")));
    figure.append(svg);
    return [figure, detail];
  };
  // What a reader must know of a panel, and what is not in it.
  const notes = (panel, cost) => {
    const list = make("ul", undefined, "notes");
    const say = (text, className) => list.append(make("li", text, className));
    const { axis, points } = panel;
    const runs = unique(panel.entries.map((entry) => entry.run));
    if (unique(runs.map((run) => run.training).filter(Boolean)).length > 1) say(`The ${runs.length} runs trained differently (text, steps or settings); a method may differ between them for that alone.`, "caution");
    if (points.length && !panel.front.length) say("No method is better here, so there is no Pareto front.");
    if (panel.untested) say("Nothing was tested here: there are no intervals, and the dashed line is no finding.", "caution");
    const noise = points.filter((entry) => entry.verdict === "undecided").length;
    if (noise) say(`${several(noise, "method")} undecided, in grey.`);
    const names = (left) => unique(left.map((entry) => entry.method)).slice(0, 6).join(", ") + (unique(left.map((entry) => entry.method)).length > 6 ? ", …" : "");
    const without = panel.entries.filter((entry) => entry.gain === null);
    for (const why of unique(without.map((entry) => entry.text))) say(`Not shown, ${why}: ${names(without.filter((entry) => entry.text === why))}.`);
    const unknown = panel.entries.filter((entry) => entry.gain !== null && entry[cost] === null);
    if (unknown.length) say(`Not shown, ${titles[cost](axis)} not recorded: ${names(unknown)}.`);
    return list;
  };
  const panelOf = (panel, cost) => {
    const { axis, machine } = panel;
    const box = make("section", undefined, "panel");
    const heading = make("h3");
    heading.append(axis.task, make("span", ` · ${axis.metric}`, "muted"));
    const where = machine === null ? "" : ` · on ${data.machines[machine]}`;
    const documents = axis.documents ? ` · ${axis.documents}` : "";
    box.append(heading, make("p", `${axis.model} · against ${axis.reference}${documents}${where}`, "sub"));
    panel.points = panel.entries.filter((entry) => entry.gain !== null && entry[cost] !== null);
    panel.untested = panel.points.length > 0 && panel.points.every((entry) => entry.verdict === "not tested" || entry.verdict === "no verdict");
    panel.front = front(panel.points.filter((entry) => panel.untested || isBetter(entry)), cost);
    const frame = make("div");
    box.append(frame, notes(panel, cost));
    box.redraw = () => {
      const width = Math.max(240, frame.clientWidth);
      if (!panel.points.length || width === panel.width) return;
      panel.width = width;
      panel.scale = scales(panel.points, cost, width);
      frame.replaceChildren(...drawPanel(panel, cost, width));
    };
    return box;
  };

  // The table.
  const COLUMNS = [
    ["method", (entry) => entry.method], ["run", (entry) => entry.run.label], ["task", (entry) => entry.axis.task],
    ["gain", (entry) => entry.gain, true], ["verdict", (entry) => data.verdicts.indexOf(entry.verdict)],
    ["parameters", (entry) => entry.parameters, true], ["time", (entry) => entry.seconds, true], ["memory", (entry) => entry.memory, true],
  ];
  const order = { column: null, direction: 1 };
  const compare = (a, b) => (a === null || b === null ? (a === null) - (b === null) : order.direction * (typeof a === "number" ? a - b : a.localeCompare(b)));
  const sorted = (shown) => (order.column === null ? shown : [...shown].sort((a, b) => compare(COLUMNS[order.column][1](a), COLUMNS[order.column][1](b))));
  const head = root.querySelector(".gains thead tr");
  COLUMNS.forEach(([name, , isNumber], column) => {
    const heading = make("th", undefined, isNumber ? "number" : "");
    heading.scope = "col";
    const press = make("button", name);
    press.type = "button";
    heading.append(press);
    press.addEventListener("click", () => {
      const next = order.column !== column ? 1 : order.direction === 1 ? -1 : 0;
      Object.assign(order, { column: next ? column : null, direction: next });
      for (const other of head.cells) other.ariaSort = null;
      heading.ariaSort = { 1: "ascending", "-1": "descending" }[next] ?? null;
      listRows();
    });
    head.append(heading);
  });
  const cell = (text, className, second) => {
    const element = make("td", text, className);
    if (second) element.append(make("small", second));
    return element;
  };
  const cost = (entry, key) => cell(entry[key] === null ? "–" : key === "parameters" ? whole(entry[key]) : words[key](entry[key]), "number");
  const rowOf = (entry) => {
    const row = make("tr", undefined, `${GREYED.has(entry.verdict) ? "greyed" : ""}${entry.run.href ? " linked" : ""}`.trim());
    const first = make("th");
    first.scope = "row";
    if (entry.run.href) {
      const link = make("a", entry.method);
      link.href = entry.run.href;
      link.setAttribute("aria-label", `${entry.method}: the report of ${entry.run.label}`);
      first.append(link);
    } else {
      first.append(entry.method);
    }
    const verdict = make("td", undefined, "name");
    const mark = make("span", "", `mark ${entry.verdict.replaceAll(" ", "-")}`);
    mark.ariaHidden = "true";
    verdict.append(make("span", undefined, "verdict"));
    verdict.firstChild.append(mark, entry.verdict);
    if (entry.seeds) verdict.append(make("small", several(entry.seeds, "seed")));
    const split = entry.text.match(/^(\S+) (.*)$/);
    const gain = entry.gain === null ? cell(entry.text, "number") : cell(split ? split[1] : entry.text, "number", split ? split[2] : "");
    row.append(first, cell(entry.run.label, "name", entry.axis.model), cell(entry.axis.task, "name", entry.axis.metric), gain, verdict,
      cost(entry, "parameters"), cost(entry, "seconds"), cost(entry, "memory"));
    return row;
  };

  // Showing it all; the state of the form is in the address, so that a view can be shared.
  const body = root.querySelector(".gains tbody");
  const panelBox = root.querySelector(".panels");
  const rowsFurther = root.querySelector(".rows-further");
  const panelsFurther = root.querySelector(".panels-further");
  const limits = { rows: MOST_ROWS, panels: MOST_PANELS };
  let shown = [];
  const listRows = () => {
    body.replaceChildren(...sorted(shown).slice(0, limits.rows).map(rowOf));
    const left = shown.length - limits.rows;
    rowsFurther.hidden = left <= 0;
    rowsFurther.textContent = `show ${Math.min(left, 1000).toLocaleString("en")} more rows`;
  };
  const listPanels = () => {
    const panels = byPanel(shown, form.elements.cost.value);
    panelBox.replaceChildren(...panels.slice(0, limits.panels).map((panel) => panelOf(panel, form.elements.cost.value)));
    for (const box of panelBox.children) box.redraw();
    panelsFurther.hidden = panels.length <= limits.panels;
    panelsFurther.textContent = `show all ${panels.length} panels`;
  };
  const show = () => {
    shown = chosen();
    Object.assign(limits, { rows: MOST_ROWS, panels: MOST_PANELS });
    const runs = new Set(shown.map((entry) => entry.run)).size;
    form.querySelector("output").textContent = `${shown.length.toLocaleString("en")} of ${several(entries.length, "difference")}, from ${several(runs, "run")}`;
    listPanels();
    listRows();
  };
  const remember = () => {
    const given = new URLSearchParams();
    for (const [name, value] of new FormData(form)) if (value !== (name === "metric" ? "primary" : name === "cost" ? "parameters" : "")) given.set(name, value);
    history.replaceState(null, "", given.size ? `#${given}` : location.pathname + location.search);
  };
  const recall = () => {
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      const field = form.elements[name];
      if (field && (!field.options || [...field.options].some((option) => option.value === value))) field.value = value;
    }
  };
  rowsFurther.addEventListener("click", () => { limits.rows += 1000; listRows(); });
  panelsFurther.addEventListener("click", () => { limits.panels = Infinity; listPanels(); });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (!event.target.closest("a") && !getSelection().toString()) row?.querySelector("a")?.click();
  });
  form.addEventListener("input", () => { show(); remember(); });
  form.addEventListener("reset", () => setTimeout(() => { show(); remember(); }));
  form.addEventListener("submit", (event) => event.preventDefault());
  new ResizeObserver(() => { for (const box of panelBox.children) box.redraw(); }).observe(panelBox);
  recall();
  root.hidden = false;
  show();
})();
