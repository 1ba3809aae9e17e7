"use strict";
(() => {
  const table = document.getElementById("cells");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const made = (tag, ...inside) => {
    const element = document.createElement(tag);
    element.append(...inside);
    return element;
  };
  const number = (row) => row.dataset.cell;
  rows.forEach((row) => { row.dataset.cell = row.cells[0].textContent; });
  const word = (row, column) => row.cells[column].firstChild?.textContent ?? "";

  // Cells without a value stand last, whichever way the others go.
  const key = (row, column) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
  const compare = (column, sign) => (a, b) => {
    const [x, y] = [a, b].map((row) => key(row, column));
    if (x === "" || y === "") return (x === "") - (y === "");
    const [m, n] = [Number(x), Number(y)];
    const order = Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m - n;
    return sign * order;
  };

  heads.forEach((head, column) => {
    const button = made("button", head.textContent);
    button.type = "button";
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const ascends = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascends ? "ascending" : "descending");
      rows.sort(compare(column, ascends ? 1 : -1));
      body.append(...rows);
    });
  });
  heads[0].setAttribute("aria-sort", "ascending");

  const form = made("form");
  form.id = "filters";
  form.autocomplete = "off";
  const columns = heads.flatMap((head, i) => ("filter" in head.dataset ? [i] : []));
  const selects = columns.map((column) => {
    const values = [...new Set(rows.map((row) => word(row, column)))];
    const select = made("select", made("option", "all"), ...values.map((value) => made("option", value || "–")));
    values.forEach((value, i) => { select.options[i + 1].value = `=${value}`; });
    select.options[0].value = "";
    form.append(made("label", `${heads[column].textContent} `, select));
    select.addEventListener("change", () => filter());
    return select;
  });
  if (table.querySelector(".extra")) {
    const box = made("input");
    box.type = "checkbox";
    box.id = "all-columns";
    form.append(made("label", box, " all KPIs and costs"));
    table.classList.add("few");
    box.addEventListener("change", () => table.classList.toggle("few", !box.checked));
  }
  const shownCount = made("output");
  shownCount.id = "shown";
  form.append(shownCount);
  table.parentElement.before(form);

  const filter = () => {
    const wanted = selects.map((select) => select.value);
    const shown = new Set();
    for (const row of rows) {
      const fits = wanted.every((value, i) => value === "" || value === `=${word(row, columns[i])}`);
      row.hidden = !fits;
      if (fits) shown.add(number(row));
    }
    all("path.cell").forEach((line) => line.classList.toggle("dim", !shown.has(line.dataset.cell)));
    all("[data-cells]").forEach((one) => {
      one.hidden = !one.dataset.cells.split(" ").some((cell) => shown.has(cell));
    });
    shownCount.textContent = `${shown.size} of ${rows.length} cells`;
  };
  filter();

  const light = (cell, on) => all(`path.cell[data-cell="${cell}"], #cells tr[data-cell="${cell}"]`)
    .forEach((one) => one.classList.toggle("lit", on));
  for (const one of [...rows, ...all("path.cell")]) {
    one.addEventListener("mouseenter", () => light(one.dataset.cell, true));
    one.addEventListener("mouseleave", () => light(one.dataset.cell, false));
  }
})();
