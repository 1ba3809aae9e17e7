"use strict";
(() => {
  const table = document.getElementById("cells");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const selects = [...document.querySelectorAll("#filters select")];
  const all = (selector) => [...document.querySelectorAll(selector)];

  // Cells without a value stand last, whichever way the others go.
  const compare = (column, sign) => (a, b) => {
    const [x, y] = [a, b].map((row) => row.cells[column].dataset.sort ?? "");
    if (x === "" || y === "") return (x === "") - (y === "");
    const [m, n] = [Number(x), Number(y)];
    const order = Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m - n;
    return sign * order;
  };

  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const ascends = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascends ? "ascending" : "descending");
      rows.sort(compare(column, ascends ? 1 : -1));
      body.append(...rows);
    });
  });

  const filter = () => {
    const wanted = selects.map((select) => select.value);
    const shown = new Set();
    for (const row of rows) {
      const has = JSON.parse(row.dataset.filter);
      const fits = wanted.every((value, i) => value === "" || value === `=${has[i]}`);
      row.hidden = !fits;
      if (fits) shown.add(row.dataset.cell);
    }
    all("path.cell").forEach((line) => line.classList.toggle("dim", !shown.has(line.dataset.cell)));
    all("[data-cells]").forEach((one) => {
      one.hidden = !one.dataset.cells.split(" ").some((cell) => shown.has(cell));
    });
    document.getElementById("shown").textContent = `${shown.size} of ${rows.length} cells`;
  };
  selects.forEach((select) => select.addEventListener("change", filter));

  document.getElementById("all-columns")?.addEventListener("change", (event) => {
    table.classList.toggle("few", !event.target.checked);
  });

  const light = (cell, on) => all(`path.cell[data-cell="${cell}"], #cells tr[data-cell="${cell}"]`)
    .forEach((one) => one.classList.toggle("lit", on));
  for (const one of [...rows, ...all("path.cell")]) {
    one.addEventListener("mouseenter", () => light(one.dataset.cell, true));
    one.addEventListener("mouseleave", () => light(one.dataset.cell, false));
  }
})();
