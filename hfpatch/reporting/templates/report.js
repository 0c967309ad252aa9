"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };

  // Light or dark: the reader's system decides until the button is used.
  const button = document.getElementById("scheme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const scheme = () => document.documentElement.dataset.scheme || (prefersDark.matches ? "dark" : "light");
  const name = () => { button.textContent = scheme() === "dark" ? "☀ light" : "☾ dark"; };
  button.addEventListener("click", () => {
    document.documentElement.dataset.scheme = scheme() === "dark" ? "light" : "dark";
    name();
  });
  prefersDark.addEventListener("change", name);
  name();
  button.hidden = false;

  // Sorting: a heading becomes a button; the rows keep their first order as the third state.
  const TIMES = { k: 1e3, M: 1e6, B: 1e9, " GiB": 1024 }; // beside MiB
  const number = (text) => {
    const plain = text.replaceAll("−", "-").replaceAll(",", "").replaceAll("∞", "1e999");
    const match = plain.match(/(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)([kMB]\b| GiB)?/);
    return match ? Number(match[1]) * (TIMES[match[2]] ?? 1) : NaN;
  };
  const shown = (cell) => (cell.querySelector(".value") || cell).textContent.trim();
  const sort = (table, column, direction) => {
    const body = table.tBodies[0];
    const numeric = table.tHead.rows[0].cells[column].classList.contains("number");
    const keyed = table.originalRows.map((row) => {
      const text = shown(row.cells[column]);
      return { row, key: numeric ? number(text) : text };
    });
    const last = (key) => (numeric ? Number.isNaN(key) : key === "–");
    if (direction) {
      keyed.sort((a, b) => {
        if (last(a.key) || last(b.key)) return last(a.key) - last(b.key);
        return direction * (numeric ? a.key - b.key || 0 : a.key.localeCompare(b.key));
      });
    }
    body.append(...keyed.map((item) => item.row));
  };
  for (const table of all("table.sortable")) {
    table.originalRows = [...table.tBodies[0].rows];
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const press = make("button");
      press.type = "button";
      press.append(...heading.childNodes);
      heading.append(press);
      press.addEventListener("click", () => {
        const next = { ascending: "descending", descending: null }[heading.ariaSort] ?? (heading.ariaSort ? null : "ascending");
        for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
        heading.ariaSort = next;
        sort(table, column, { ascending: 1, descending: -1 }[next] || 0);
      });
    });
  }

  // Filters.
  for (const form of all("form.controls[data-for]")) {
    const rows = [...document.getElementById(form.dataset.for).tBodies[0].rows];
    const search = form.querySelector("input");
    const filter = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const choices = all("select", form).filter((select) => select.value);
      let left = 0;
      for (const row of rows) {
        row.searched ??= row.textContent.toLowerCase();
        const fits = words.every((word) => row.searched.includes(word))
          && choices.every((select) => row.dataset[select.dataset.attribute].split(" ").includes(select.value));
        row.hidden = !fits;
        left += fits;
      }
      form.querySelector("output").textContent = `${left} of ${rows.length} rows`;
    };
    form.addEventListener("input", filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    filter();
    form.hidden = false;
  }

  // A figure as a file of its own, in the colours that are shown.
  for (const press of all("button.svg")) {
    press.hidden = false;
    press.addEventListener("click", () => {
      const figure = press.closest("section").querySelector("figure svg");
      const probe = press.appendChild(make("span"));
      const colour = (variable) => {
        probe.style.color = variable;
        return getComputedStyle(probe).color;
      };
      const text = new XMLSerializer().serializeToString(figure).replace(/var\(--[a-z]+(, #[0-9a-f]+)?\)/g, colour);
      probe.remove();
      const link = make("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
      link.download = press.dataset.name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }

  addEventListener("beforeprint", () => all("details").forEach((details) => { details.open = true; }));
})();
